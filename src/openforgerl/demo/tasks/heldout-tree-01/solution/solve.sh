#!/bin/bash
set -eu
cd /workspace
mkdir -p key/cat
