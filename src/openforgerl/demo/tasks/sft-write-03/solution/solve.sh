#!/bin/bash
set -eu
cd /workspace
printf '%s' 'coin queen' > sand.dat
