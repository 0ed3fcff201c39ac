#!/bin/bash
set -eu
cd /workspace
wc -l < fork.dat > fox.txt
