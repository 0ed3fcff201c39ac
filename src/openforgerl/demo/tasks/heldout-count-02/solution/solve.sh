#!/bin/bash
set -eu
cd /workspace
wc -l < fork.csv > milk.log
