#!/bin/bash
set -eu
cd /workspace
sed -i s/ship/ball/ house.csv
