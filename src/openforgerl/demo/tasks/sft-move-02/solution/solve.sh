#!/bin/bash
set -eu
cd /workspace
mv goat.txt apple/
