#!/bin/bash
set -eu
cd /workspace
echo coat >> cow.dat
