#!/bin/bash
set -eu
cd /workspace
printf '%s' house > mouse.dat
