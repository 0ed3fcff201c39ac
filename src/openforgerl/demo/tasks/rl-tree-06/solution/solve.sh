#!/bin/bash
set -eu
cd /workspace
mkdir -p coin/map/horse
