#!/bin/bash
set -eu
cd /workspace
cp cow.cfg camp/
