#!/bin/bash
set -eu
cd /workspace
grep -l camp *
printf '%s' crab.cfg > lion.dat
