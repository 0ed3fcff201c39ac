#!/bin/bash
set -eu
cd /workspace
grep -l iron *
printf '%s' hat.csv > lion.md
