#!/bin/bash
set -eu
cd /workspace
printf '%s' fish > bag.csv
