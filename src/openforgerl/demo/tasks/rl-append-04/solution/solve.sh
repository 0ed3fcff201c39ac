#!/bin/bash
set -eu
cd /workspace
echo ring >> fish.dat
