#!/bin/bash
set -eu
cd /workspace
printf '%s' seed > lion.txt
