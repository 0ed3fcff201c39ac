#!/bin/bash
set -eu
cd /workspace
echo bear >> horse.cfg
