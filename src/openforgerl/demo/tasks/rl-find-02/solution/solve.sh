#!/bin/bash
set -eu
cd /workspace
grep -l desk *
printf '%s' ship.txt > kite.md
