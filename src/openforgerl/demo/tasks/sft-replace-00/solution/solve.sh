#!/bin/bash
set -eu
cd /workspace
sed -i s/arm/chair/ band.txt
