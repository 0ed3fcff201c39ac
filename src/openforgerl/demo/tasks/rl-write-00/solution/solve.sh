#!/bin/bash
set -eu
cd /workspace
printf '%s' 'ring drum' > ship.txt
