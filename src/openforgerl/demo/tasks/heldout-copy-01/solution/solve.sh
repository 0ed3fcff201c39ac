#!/bin/bash
set -eu
cd /workspace
cp farm.cfg pig.dat
