#!/bin/bash
set -eu
cd /workspace
mkdir -p pond/goat
