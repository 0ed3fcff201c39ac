#!/bin/bash
set -eu
cd /workspace
mkdir -p bus/hand
