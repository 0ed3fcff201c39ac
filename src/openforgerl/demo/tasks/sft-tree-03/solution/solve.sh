#!/bin/bash
set -eu
cd /workspace
mkdir -p crab/drum/ocean
