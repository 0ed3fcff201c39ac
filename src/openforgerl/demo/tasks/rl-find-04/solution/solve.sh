#!/bin/bash
set -eu
cd /workspace
grep -l pond *
printf '%s' road.csv > ring.cfg
