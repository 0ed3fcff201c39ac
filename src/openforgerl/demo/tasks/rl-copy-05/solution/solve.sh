#!/bin/bash
set -eu
cd /workspace
cp chair.dat bike.cfg
