#!/bin/bash
set -eu
cd /workspace
printf '%s' house > iron.csv
