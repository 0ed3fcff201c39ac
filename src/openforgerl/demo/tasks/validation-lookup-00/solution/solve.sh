#!/bin/bash
set -eu
cd /workspace
printf '%s' crab > coin.csv
