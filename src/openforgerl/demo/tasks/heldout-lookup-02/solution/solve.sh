#!/bin/bash
set -eu
cd /workspace
printf '%s' ocean > cup.cfg
