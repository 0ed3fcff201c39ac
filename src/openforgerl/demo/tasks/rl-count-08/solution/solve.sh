#!/bin/bash
set -eu
cd /workspace
wc -l < kite.md > boat.cfg
