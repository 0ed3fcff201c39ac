#!/bin/bash
set -eu
cd /workspace
sed -i s/seed/rock/ girl.md
