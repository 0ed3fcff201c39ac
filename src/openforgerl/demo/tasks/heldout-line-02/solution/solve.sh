#!/bin/bash
set -eu
cd /workspace
sed -n 5p rain.cfg > dress.log
