#!/bin/bash
set -eu
cd /workspace
printf '%s' 'iron ship' > bus.txt
