#!/bin/bash
set -eu
cd /workspace
echo fork >> cake.txt
