#!/bin/bash
set -eu
cd /workspace
cp road.csv bear.cfg
