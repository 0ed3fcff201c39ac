#!/bin/bash
set -eu
cd /workspace
printf '%s' arm > cat.dat
