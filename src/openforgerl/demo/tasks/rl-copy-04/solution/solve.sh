#!/bin/bash
set -eu
cd /workspace
cp pond.csv leaf.dat
