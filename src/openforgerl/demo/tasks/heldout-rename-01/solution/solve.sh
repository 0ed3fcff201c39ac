#!/bin/bash
set -eu
cd /workspace
mv coat.dat band.md
