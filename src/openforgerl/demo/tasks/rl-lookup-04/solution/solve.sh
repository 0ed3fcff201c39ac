#!/bin/bash
set -eu
cd /workspace
printf '%s' clock > cart.txt
