#!/bin/bash
set -eu
cd /workspace
mv plant.md hand/
