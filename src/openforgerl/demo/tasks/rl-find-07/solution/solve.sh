#!/bin/bash
set -eu
cd /workspace
grep -l bread *
printf '%s' camp.csv > field.csv
