#!/bin/bash
set -eu
cd /workspace
printf '%s' 'crab milk' > cup.md
