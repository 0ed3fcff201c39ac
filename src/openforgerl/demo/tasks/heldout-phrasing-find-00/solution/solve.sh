#!/bin/bash
set -eu
cd /workspace
grep -l bowl *
printf '%s' bean.txt > fox.csv
