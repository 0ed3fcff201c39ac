#!/bin/bash
set -eu
cd /workspace
rm door.md dish.txt
