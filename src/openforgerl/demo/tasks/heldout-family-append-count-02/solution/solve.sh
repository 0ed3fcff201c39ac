#!/bin/bash
set -eu
cd /workspace
wc -l < coat.txt >> duck.md
