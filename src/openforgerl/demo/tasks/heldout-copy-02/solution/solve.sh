#!/bin/bash
set -eu
cd /workspace
cp house.cfg drum.csv
