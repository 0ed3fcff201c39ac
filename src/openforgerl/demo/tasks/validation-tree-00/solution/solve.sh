#!/bin/bash
set -eu
cd /workspace
mkdir -p cow/gold/dog
