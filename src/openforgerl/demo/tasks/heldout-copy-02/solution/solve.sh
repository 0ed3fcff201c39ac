#!/bin/bash
set -eu
cd /workspace
cp kite.csv lake.log
