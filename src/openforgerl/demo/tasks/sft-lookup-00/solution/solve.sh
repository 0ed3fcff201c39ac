#!/bin/bash
set -eu
cd /workspace
printf '%s' pear > brick.csv
