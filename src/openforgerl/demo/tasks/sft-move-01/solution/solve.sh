#!/bin/bash
set -eu
cd /workspace
mv road.csv coat/
