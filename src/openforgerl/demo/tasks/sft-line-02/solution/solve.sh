#!/bin/bash
set -eu
cd /workspace
sed -n 4p sand.log > lamp.dat
