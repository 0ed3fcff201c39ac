#!/bin/bash
set -eu
cd /workspace
echo ocean >> seed.csv
