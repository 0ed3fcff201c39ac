#!/bin/bash
set -eu
cd /workspace
mv gate.csv bread.cfg
