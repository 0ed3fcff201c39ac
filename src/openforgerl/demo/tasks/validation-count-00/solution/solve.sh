#!/bin/bash
set -eu
cd /workspace
wc -l < boot.md > king.cfg
