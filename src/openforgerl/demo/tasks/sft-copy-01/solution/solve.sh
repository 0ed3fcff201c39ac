#!/bin/bash
set -eu
cd /workspace
cp bed.log pen.cfg
