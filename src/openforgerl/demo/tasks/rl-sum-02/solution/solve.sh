#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ pond.txt))) > cake.csv
