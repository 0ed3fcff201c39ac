#!/bin/bash
set -eu
cd /workspace
sed -n 5p crab.csv > egg.dat
