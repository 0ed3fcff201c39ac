#!/bin/bash
set -eu
cd /workspace
rm river.cfg goat.md
