#!/bin/bash
set -eu
cd /workspace
printf '%s' 'crow arm' > rose.csv
