#!/bin/bash
set -eu
cd /workspace
printf '%s' cow > fork.log
