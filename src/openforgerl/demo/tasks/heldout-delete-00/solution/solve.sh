#!/bin/bash
set -eu
cd /workspace
rm mouse.csv fish.csv
