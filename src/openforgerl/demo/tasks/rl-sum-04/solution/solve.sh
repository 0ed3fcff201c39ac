#!/bin/bash
set -eu
cd /workspace
awk '{s+=$1} END {print s}' mouse.cfg > box.md
