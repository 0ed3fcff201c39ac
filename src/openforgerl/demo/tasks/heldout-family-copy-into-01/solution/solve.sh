#!/bin/bash
set -eu
cd /workspace
cp bell.dat ship/
