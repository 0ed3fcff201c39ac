#!/bin/bash
set -eu
cd /workspace
mv ship.log ocean.csv
