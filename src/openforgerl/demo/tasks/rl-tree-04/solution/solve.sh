#!/bin/bash
set -eu
cd /workspace
mkdir -p bean/chair
