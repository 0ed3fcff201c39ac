#!/bin/bash
set -eu
cd /workspace
wc -l < nest.txt >> bed.log
