#!/bin/bash
set -eu
cd /workspace
printf '%s' 'fork bean' > corn.cfg
