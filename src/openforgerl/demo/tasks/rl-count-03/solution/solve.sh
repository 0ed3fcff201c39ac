#!/bin/bash
set -eu
cd /workspace
wc -l < house.csv > cart.dat
