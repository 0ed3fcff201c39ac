#!/bin/bash
set -eu
cd /workspace
printf '%s' 'barn cow' > drum.csv
