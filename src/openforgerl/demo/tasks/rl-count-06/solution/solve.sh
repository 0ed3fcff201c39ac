#!/bin/bash
set -eu
cd /workspace
wc -l < bell.csv > plant.txt
