#!/bin/bash
set -eu
cd /workspace
echo ocean >> corn.txt
