#!/bin/bash
set -eu
cd /workspace
cp farm.md fork/
