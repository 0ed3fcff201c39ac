#!/bin/bash
set -eu
cd /workspace
wc -l < fish.txt > coin.csv
