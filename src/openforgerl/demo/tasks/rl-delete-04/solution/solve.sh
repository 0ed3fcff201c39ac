#!/bin/bash
set -eu
cd /workspace
rm chair.csv desk.txt
