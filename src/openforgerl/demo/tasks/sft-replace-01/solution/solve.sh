#!/bin/bash
set -eu
cd /workspace
sed -i s/kite/fork/ arm.csv
