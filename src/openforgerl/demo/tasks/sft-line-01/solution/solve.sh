#!/bin/bash
set -eu
cd /workspace
sed -n 5p clock.md > bird.dat
