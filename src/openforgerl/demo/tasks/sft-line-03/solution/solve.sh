#!/bin/bash
set -eu
cd /workspace
sed -n 4p brick.dat > grass.csv
