#!/bin/bash
set -eu
cd /workspace
cp bone.txt jar.dat
