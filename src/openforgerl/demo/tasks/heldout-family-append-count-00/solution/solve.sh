#!/bin/bash
set -eu
cd /workspace
wc -l < onion.csv >> cook.md
