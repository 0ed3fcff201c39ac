#!/bin/bash
set -eu
cd /workspace
mv crab.log rose/
