#!/bin/bash
set -eu
cd /workspace
printf '%s' camp > grass.csv
