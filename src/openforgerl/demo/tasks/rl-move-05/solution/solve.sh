#!/bin/bash
set -eu
cd /workspace
mv milk.dat lamp/
