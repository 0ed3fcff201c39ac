#!/bin/bash
set -eu
cd /workspace
wc -l < queen.md > key.md
