#!/bin/bash
set -eu
cd /workspace
cp clock.log bread.md
