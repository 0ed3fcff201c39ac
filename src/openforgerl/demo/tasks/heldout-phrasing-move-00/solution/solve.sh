#!/bin/bash
set -eu
cd /workspace
mv moon.md cloud/
