#!/bin/bash
set -eu
cd /workspace
sed -n 2p arm.dat > lake.txt
