#!/bin/bash
set -eu
cd /workspace
wc -l < lake.cfg > queen.cfg
