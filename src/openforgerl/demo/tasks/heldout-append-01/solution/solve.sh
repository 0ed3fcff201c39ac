#!/bin/bash
set -eu
cd /workspace
echo seed >> jar.txt
