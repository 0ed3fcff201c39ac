#!/bin/bash
set -eu
cd /workspace
printf '%s' 'pear crab' > map.txt
