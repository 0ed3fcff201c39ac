#!/bin/bash
set -eu
cd /workspace
printf '%s' grass > milk.dat
