#!/bin/bash
set -eu
cd /workspace
mkdir -p hill/leaf
