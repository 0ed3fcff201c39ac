#!/bin/bash
set -eu
cd /workspace
sort egg.md > ocean.txt
