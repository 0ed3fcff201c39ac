#!/bin/bash
set -eu
cd /workspace
sed -n 5p arm.dat > queen.cfg
