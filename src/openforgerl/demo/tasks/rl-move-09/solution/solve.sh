#!/bin/bash
set -eu
cd /workspace
mv bear.dat boot/
