#!/bin/bash
set -eu
cd /workspace
grep -l pig *
printf '%s' cake.log > bone.txt
