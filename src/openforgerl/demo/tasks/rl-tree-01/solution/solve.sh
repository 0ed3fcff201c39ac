#!/bin/bash
set -eu
cd /workspace
mkdir -p horse/hand
