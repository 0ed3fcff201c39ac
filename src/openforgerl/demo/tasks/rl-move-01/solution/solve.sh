#!/bin/bash
set -eu
cd /workspace
mv bag.md dress/
