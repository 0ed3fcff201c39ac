#!/bin/bash
set -eu
cd /workspace
mv lamp.csv dress/
