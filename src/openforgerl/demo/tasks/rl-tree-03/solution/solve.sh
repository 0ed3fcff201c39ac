#!/bin/bash
set -eu
cd /workspace
mkdir -p plant/king
