#!/bin/bash
set -eu
cd /workspace
mv goat.csv rock/
