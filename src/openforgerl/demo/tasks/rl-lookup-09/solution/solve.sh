#!/bin/bash
set -eu
cd /workspace
printf '%s' frog > boat.md
