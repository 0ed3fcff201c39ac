#!/bin/bash
set -eu
cd /workspace
grep -l egg *
printf '%s' king.dat > rain.dat
