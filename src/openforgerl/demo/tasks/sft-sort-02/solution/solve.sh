#!/bin/bash
set -eu
cd /workspace
sort fork.log > band.csv
