#!/bin/bash
set -eu
cd /workspace
printf '%s' 'door mouse apple' > king.md
