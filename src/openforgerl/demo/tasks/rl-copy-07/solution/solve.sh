#!/bin/bash
set -eu
cd /workspace
cp rain.md hat.txt
