#!/bin/bash
set -eu
cd /workspace
wc -l < coat.log > nest.dat
