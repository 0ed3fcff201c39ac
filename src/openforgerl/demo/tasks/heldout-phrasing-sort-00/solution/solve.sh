#!/bin/bash
set -eu
cd /workspace
sort egg.txt > gold.txt
