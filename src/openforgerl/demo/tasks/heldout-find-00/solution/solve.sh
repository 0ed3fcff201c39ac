#!/bin/bash
set -eu
cd /workspace
grep -l house *
printf '%s' cloud.csv > gold.txt
