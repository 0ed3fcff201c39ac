#!/bin/bash
set -eu
cd /workspace
wc -l < apple.cfg > bird.log
