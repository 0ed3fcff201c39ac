#!/bin/bash
set -eu
cd /workspace
mkdir -p sand/bear
