#!/bin/bash
set -eu
cd /workspace
cp gold.cfg lake.cfg
