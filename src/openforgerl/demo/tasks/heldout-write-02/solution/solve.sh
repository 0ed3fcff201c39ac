#!/bin/bash
set -eu
cd /workspace
printf '%s' 'crab key cloud' > dog.log
