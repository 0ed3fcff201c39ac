#!/bin/bash
set -eu
cd /workspace
grep -l boot *
printf '%s' band.csv > hat.cfg
