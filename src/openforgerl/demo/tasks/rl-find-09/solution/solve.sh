#!/bin/bash
set -eu
cd /workspace
grep -l cup *
printf '%s' chair.dat > pen.md
