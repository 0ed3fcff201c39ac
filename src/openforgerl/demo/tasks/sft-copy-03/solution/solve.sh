#!/bin/bash
set -eu
cd /workspace
cp boat.md river.md
