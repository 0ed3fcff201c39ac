#!/bin/bash
set -eu
cd /workspace
mv rose.csv duck/
