#!/bin/bash
set -eu
cd /workspace
grep -l hill *
printf '%s' bed.txt > bean.md
