#!/bin/bash
set -eu
cd /workspace
rm frog.log field.md
