#!/bin/bash
set -eu
cd /workspace
sed -i s/moon/ring/ mouse.md
