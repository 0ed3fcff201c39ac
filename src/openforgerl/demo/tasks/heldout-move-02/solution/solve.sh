#!/bin/bash
set -eu
cd /workspace
mv leaf.dat pig/
