#!/bin/bash
set -eu
cd /workspace
wc -l < apple.txt > bone.md
