#!/bin/bash
set -eu
cd /workspace
echo door >> road.csv
