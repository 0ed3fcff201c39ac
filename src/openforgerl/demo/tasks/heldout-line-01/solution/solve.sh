#!/bin/bash
set -eu
cd /workspace
sed -n 2p cow.csv > nest.md
