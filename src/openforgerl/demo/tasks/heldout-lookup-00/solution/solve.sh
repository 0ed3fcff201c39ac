#!/bin/bash
set -eu
cd /workspace
printf '%s' apple > king.md
