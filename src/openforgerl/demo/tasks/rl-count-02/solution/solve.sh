#!/bin/bash
set -eu
cd /workspace
wc -l < band.cfg > chair.log
