#!/bin/bash
set -eu
cd /workspace
printf '%s' cart > grass.cfg
