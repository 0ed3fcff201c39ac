#!/bin/bash
set -eu
cd /workspace
cp nest.csv lamp.md
