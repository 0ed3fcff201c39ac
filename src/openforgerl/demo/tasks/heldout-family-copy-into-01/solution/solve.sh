#!/bin/bash
set -eu
cd /workspace
cp coin.csv river/
