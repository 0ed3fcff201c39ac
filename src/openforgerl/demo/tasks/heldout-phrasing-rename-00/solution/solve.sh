#!/bin/bash
set -eu
cd /workspace
mv lamp.log cloud.md
