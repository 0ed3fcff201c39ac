#!/bin/bash
set -eu
cd /workspace
echo cat >> milk.dat
