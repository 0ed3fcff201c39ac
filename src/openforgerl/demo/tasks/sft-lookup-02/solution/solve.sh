#!/bin/bash
set -eu
cd /workspace
printf '%s' corn > bell.cfg
