#!/bin/bash
set -eu
cd /workspace
sed -n 4p bell.txt > lion.dat
