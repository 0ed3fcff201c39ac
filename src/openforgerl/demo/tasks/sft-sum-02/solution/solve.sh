#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ dish.txt))) > goat.csv
