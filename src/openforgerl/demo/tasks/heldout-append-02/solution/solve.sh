#!/bin/bash
set -eu
cd /workspace
echo seed >> rain.cfg
