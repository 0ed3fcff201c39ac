#!/bin/bash
set -eu
cd /workspace
cp queen.txt arm.csv
