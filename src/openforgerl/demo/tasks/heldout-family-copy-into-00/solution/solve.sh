#!/bin/bash
set -eu
cd /workspace
cp bike.txt mouse/
