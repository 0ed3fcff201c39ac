#!/bin/bash
set -eu
cd /workspace
printf '%s' 'clock lamp' > boot.txt
