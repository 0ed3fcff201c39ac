#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ lamp.csv))) > apple.dat
