#!/bin/bash
set -eu
cd /workspace
grep -l lake *
printf '%s' iron.cfg > coat.dat
