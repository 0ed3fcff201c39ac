#!/bin/bash
set -eu
cd /workspace
mv bowl.log door.md
