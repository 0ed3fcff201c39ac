#!/bin/bash
set -eu
cd /workspace
cp iron.txt hill/
