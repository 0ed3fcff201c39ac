#!/bin/bash
set -eu
cd /workspace
mv hand.cfg milk.md
