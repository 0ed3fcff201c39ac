#!/bin/bash
set -eu
cd /workspace
rm gate.csv ocean.txt
