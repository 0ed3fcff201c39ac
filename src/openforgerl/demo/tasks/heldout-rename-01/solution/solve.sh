#!/bin/bash
set -eu
cd /workspace
mv brick.cfg rose.md
