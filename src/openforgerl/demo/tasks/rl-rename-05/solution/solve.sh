#!/bin/bash
set -eu
cd /workspace
mv arm.csv cake.md
