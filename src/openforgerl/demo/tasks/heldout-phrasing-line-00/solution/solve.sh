#!/bin/bash
set -eu
cd /workspace
sed -n 7p shoe.txt > plant.md
