#!/bin/bash
set -eu
cd /workspace
sed -n 4p flag.dat > egg.cfg
