#!/bin/bash
set -eu
cd /workspace
wc -l < rain.txt > map.log
