#!/bin/bash
set -eu
cd /workspace
printf '%s' 'bean camp' > chair.csv
