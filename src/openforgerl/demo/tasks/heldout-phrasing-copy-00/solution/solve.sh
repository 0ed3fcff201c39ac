#!/bin/bash
set -eu
cd /workspace
cp box.cfg rose.md
