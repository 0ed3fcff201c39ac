#!/bin/bash
set -eu
cd /workspace
rm iron.csv chair.dat
