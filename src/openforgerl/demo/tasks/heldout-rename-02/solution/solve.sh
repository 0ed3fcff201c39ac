#!/bin/bash
set -eu
cd /workspace
mv kite.csv pen.dat
