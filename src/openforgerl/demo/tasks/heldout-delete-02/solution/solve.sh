#!/bin/bash
set -eu
cd /workspace
rm farm.txt cart.md
