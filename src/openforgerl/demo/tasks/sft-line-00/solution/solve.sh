#!/bin/bash
set -eu
cd /workspace
sed -n 2p bell.txt > cat.log
