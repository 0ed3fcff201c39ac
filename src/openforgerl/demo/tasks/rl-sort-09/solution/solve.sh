#!/bin/bash
set -eu
cd /workspace
sort cat.txt > box.log
