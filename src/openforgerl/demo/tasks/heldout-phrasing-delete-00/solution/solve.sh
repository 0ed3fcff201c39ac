#!/bin/bash
set -eu
cd /workspace
rm ocean.dat moon.log
