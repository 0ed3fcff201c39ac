#!/bin/bash
set -eu
cd /workspace
cp boat.dat desk.dat
