#!/bin/bash
set -eu
cd /workspace
sort rain.md > rose.cfg
