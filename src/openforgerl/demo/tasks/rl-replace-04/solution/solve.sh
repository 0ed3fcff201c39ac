#!/bin/bash
set -eu
cd /workspace
sed -i s/kite/rain/ desk.txt
