#!/bin/bash
set -eu
cd /workspace
sort crab.md > fork.log
