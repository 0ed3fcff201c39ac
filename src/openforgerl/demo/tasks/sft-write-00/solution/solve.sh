#!/bin/bash
set -eu
cd /workspace
printf '%s' 'fish dish' > cup.dat
