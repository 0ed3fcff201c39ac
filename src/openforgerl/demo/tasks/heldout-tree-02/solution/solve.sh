#!/bin/bash
set -eu
cd /workspace
mkdir -p milk/egg
