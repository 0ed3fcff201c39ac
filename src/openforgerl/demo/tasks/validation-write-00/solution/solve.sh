#!/bin/bash
set -eu
cd /workspace
printf '%s' 'nest sand cake' > girl.txt
