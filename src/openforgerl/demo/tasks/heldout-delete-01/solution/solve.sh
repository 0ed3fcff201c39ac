#!/bin/bash
set -eu
cd /workspace
rm rain.csv iron.csv
