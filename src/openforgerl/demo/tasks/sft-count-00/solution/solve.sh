#!/bin/bash
set -eu
cd /workspace
wc -l < band.dat > nail.dat
