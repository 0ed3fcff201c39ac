#!/bin/bash
set -eu
cd /workspace
mkdir -p field/pond
