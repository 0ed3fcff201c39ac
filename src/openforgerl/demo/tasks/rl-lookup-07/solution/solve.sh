#!/bin/bash
set -eu
cd /workspace
printf '%s' house > gold.csv
