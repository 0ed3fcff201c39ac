#!/bin/bash
set -eu
cd /workspace
grep -l brick *
printf '%s' coat.log > ship.txt
