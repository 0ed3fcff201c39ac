#!/bin/bash
set -eu
cd /workspace
sed -n 3p corn.dat > fox.dat
