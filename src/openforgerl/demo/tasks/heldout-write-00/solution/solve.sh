#!/bin/bash
set -eu
cd /workspace
printf '%s' 'gold bird' > goat.csv
