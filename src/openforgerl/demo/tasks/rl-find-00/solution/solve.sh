#!/bin/bash
set -eu
cd /workspace
grep -l lion *
printf '%s' bus.txt > barn.log
