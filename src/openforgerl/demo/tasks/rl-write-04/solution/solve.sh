#!/bin/bash
set -eu
cd /workspace
printf '%s' 'ship lion' > band.log
