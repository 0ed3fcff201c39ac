#!/bin/bash
set -eu
cd /workspace
wc -l < grass.txt > onion.log
