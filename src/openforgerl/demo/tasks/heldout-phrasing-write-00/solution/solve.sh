#!/bin/bash
set -eu
cd /workspace
printf '%s' 'bowl bird' > plant.csv
