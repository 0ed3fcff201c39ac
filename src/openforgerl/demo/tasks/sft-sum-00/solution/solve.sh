#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ coin.dat))) > iron.log
