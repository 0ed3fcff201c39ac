#!/bin/bash
set -eu
cd /workspace
mv pig.md horse.md
