#!/bin/bash
set -eu
cd /workspace
mv pond.csv gold/
