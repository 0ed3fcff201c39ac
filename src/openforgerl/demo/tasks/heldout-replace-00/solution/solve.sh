#!/bin/bash
set -eu
cd /workspace
sed -i s/ball/grass/ cart.txt
