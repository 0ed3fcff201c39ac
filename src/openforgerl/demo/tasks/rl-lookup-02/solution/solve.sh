#!/bin/bash
set -eu
cd /workspace
printf '%s' boat > fork.log
