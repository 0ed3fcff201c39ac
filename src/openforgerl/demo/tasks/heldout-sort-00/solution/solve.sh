#!/bin/bash
set -eu
cd /workspace
sort key.cfg > cart.txt
