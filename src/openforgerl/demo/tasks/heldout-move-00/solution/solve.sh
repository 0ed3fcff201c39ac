#!/bin/bash
set -eu
cd /workspace
mv boat.log crab/
