#!/bin/bash
set -eu
cd /workspace
mkdir -p ocean/corn
