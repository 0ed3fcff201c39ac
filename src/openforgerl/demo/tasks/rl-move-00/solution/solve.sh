#!/bin/bash
set -eu
cd /workspace
mv door.cfg card/
