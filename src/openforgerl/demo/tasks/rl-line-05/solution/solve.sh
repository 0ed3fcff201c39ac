#!/bin/bash
set -eu
cd /workspace
sed -n 6p gate.cfg > ball.md
