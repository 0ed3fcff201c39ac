#!/bin/bash
set -eu
cd /workspace
grep -l road *
printf '%s' river.md > book.txt
