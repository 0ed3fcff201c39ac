#!/bin/bash
set -eu
cd /workspace
sed -n 2p bell.dat > iron.csv
