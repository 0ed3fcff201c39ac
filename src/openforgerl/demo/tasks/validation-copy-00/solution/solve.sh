#!/bin/bash
set -eu
cd /workspace
cp bread.md house.cfg
