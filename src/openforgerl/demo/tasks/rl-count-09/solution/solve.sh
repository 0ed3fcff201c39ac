#!/bin/bash
set -eu
cd /workspace
wc -l < bread.dat > coin.dat
