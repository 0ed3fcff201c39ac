#!/bin/bash
set -eu
cd /workspace
sort rain.txt > farm.txt
