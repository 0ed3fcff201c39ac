#!/bin/bash
set -eu
cd /workspace
grep -l ocean *
printf '%s' bear.csv > gold.txt
