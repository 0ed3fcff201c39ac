#!/bin/bash
set -eu
cd /workspace
wc -l < door.txt > bed.cfg
