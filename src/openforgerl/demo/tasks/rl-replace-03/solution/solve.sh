#!/bin/bash
set -eu
cd /workspace
sed -i s/rose/egg/ king.dat
