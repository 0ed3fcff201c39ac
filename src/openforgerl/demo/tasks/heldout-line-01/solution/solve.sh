#!/bin/bash
set -eu
cd /workspace
sed -n 8p apple.csv > seed.cfg
