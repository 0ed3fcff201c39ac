#!/bin/bash
set -eu
cd /workspace
sed -i s/milk/flag/ river.csv
