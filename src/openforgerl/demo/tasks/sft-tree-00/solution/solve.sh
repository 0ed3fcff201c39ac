#!/bin/bash
set -eu
cd /workspace
mkdir -p dress/moon
