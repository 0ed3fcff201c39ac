#!/bin/bash
set -eu
cd /workspace
echo crab >> dress.txt
