#!/bin/bash
set -eu
cd /workspace
sed -n 5p flag.txt > bone.cfg
