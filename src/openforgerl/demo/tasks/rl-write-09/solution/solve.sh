#!/bin/bash
set -eu
cd /workspace
printf '%s' 'milk mouse cake' > cow.log
