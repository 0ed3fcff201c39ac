#!/bin/bash
set -eu
cd /workspace
mv hill.log pen.txt
