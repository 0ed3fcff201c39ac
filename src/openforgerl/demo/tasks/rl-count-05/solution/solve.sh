#!/bin/bash
set -eu
cd /workspace
wc -l < bean.md > book.log
