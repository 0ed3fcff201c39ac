#!/bin/bash
set -eu
cd /workspace
grep -l mouse *
printf '%s' dog.txt > apple.dat
