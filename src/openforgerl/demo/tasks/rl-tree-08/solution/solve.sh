#!/bin/bash
set -eu
cd /workspace
mkdir -p goat/horse
