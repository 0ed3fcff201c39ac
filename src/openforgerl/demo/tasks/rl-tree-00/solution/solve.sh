#!/bin/bash
set -eu
cd /workspace
mkdir -p bowl/bean/hand
