#!/bin/bash
set -eu
cd /workspace
grep -l bear *
printf '%s' coat.md > ball.csv
