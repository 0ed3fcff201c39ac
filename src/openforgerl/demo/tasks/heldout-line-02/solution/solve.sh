#!/bin/bash
set -eu
cd /workspace
sed -n 6p king.log > leaf.md
