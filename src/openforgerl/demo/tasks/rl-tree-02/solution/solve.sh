#!/bin/bash
set -eu
cd /workspace
mkdir -p clock/barn
