#!/bin/bash
set -eu
cd /workspace
sort rose.txt > key.cfg
