#!/bin/bash
set -eu
cd /workspace
mv bird.md key.csv
