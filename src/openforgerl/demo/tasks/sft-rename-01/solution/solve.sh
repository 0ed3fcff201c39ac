#!/bin/bash
set -eu
cd /workspace
mv boot.dat camp.md
