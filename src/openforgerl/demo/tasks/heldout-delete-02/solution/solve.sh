#!/bin/bash
set -eu
cd /workspace
rm lamp.csv gate.txt
