#!/bin/bash
set -eu
cd /workspace
printf '%s' 'bean rose' > nest.log
