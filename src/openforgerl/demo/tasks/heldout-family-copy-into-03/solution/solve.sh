#!/bin/bash
set -eu
cd /workspace
cp clock.dat ship/
