#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ grass.txt))) > rose.cfg
