#!/bin/bash
set -eu
cd /workspace
cp desk.txt bear.md
