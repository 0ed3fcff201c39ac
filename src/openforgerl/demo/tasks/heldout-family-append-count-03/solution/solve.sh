#!/bin/bash
set -eu
cd /workspace
wc -l < bag.dat >> queen.csv
