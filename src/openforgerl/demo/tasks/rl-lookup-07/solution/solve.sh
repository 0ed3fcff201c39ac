#!/bin/bash
set -eu
cd /workspace
printf '%s' boot > gold.csv
