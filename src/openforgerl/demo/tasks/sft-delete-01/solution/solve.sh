#!/bin/bash
set -eu
cd /workspace
rm queen.cfg bike.cfg
