#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ flag.csv))) > pear.md
