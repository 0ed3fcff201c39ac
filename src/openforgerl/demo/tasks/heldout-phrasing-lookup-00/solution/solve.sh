#!/bin/bash
set -eu
cd /workspace
printf '%s' pig > cake.md
