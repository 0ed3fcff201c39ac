#!/bin/bash
set -eu
cd /workspace
wc -l < bean.dat > cup.md
