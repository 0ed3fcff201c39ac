#!/bin/bash
set -eu
cd /workspace
grep -l apple *
printf '%s' dog.cfg > cat.log
