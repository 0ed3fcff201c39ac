#!/bin/bash
set -eu
cd /workspace
sort leaf.dat > pen.dat
