#!/bin/bash
set -eu
cd /workspace
sed -n 2p cup.md > bone.csv
