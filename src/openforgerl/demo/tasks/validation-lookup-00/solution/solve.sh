#!/bin/bash
set -eu
cd /workspace
printf '%s' lamp > river.md
