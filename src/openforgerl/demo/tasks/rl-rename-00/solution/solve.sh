#!/bin/bash
set -eu
cd /workspace
mv house.md boat.md
