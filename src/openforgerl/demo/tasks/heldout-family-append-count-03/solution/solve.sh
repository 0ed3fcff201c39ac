#!/bin/bash
set -eu
cd /workspace
wc -l < cook.txt >> ring.log
