#!/bin/bash
set -eu
cd /workspace
rm boat.txt lion.csv
