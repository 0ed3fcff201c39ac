#!/bin/bash
set -eu
cd /workspace
cp pig.txt key.cfg
