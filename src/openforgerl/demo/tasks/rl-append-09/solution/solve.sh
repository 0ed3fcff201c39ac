#!/bin/bash
set -eu
cd /workspace
echo shoe >> camp.txt
