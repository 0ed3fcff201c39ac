#!/bin/bash
set -eu
cd /workspace
rm leaf.dat band.dat
