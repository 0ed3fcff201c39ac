#!/bin/bash
set -eu
cd /workspace
sort cow.md > egg.csv
