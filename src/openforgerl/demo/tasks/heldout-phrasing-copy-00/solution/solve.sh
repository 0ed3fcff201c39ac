#!/bin/bash
set -eu
cd /workspace
cp ocean.cfg lake.dat
