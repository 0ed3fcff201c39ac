#!/bin/bash
set -eu
cd /workspace
sed -i s/rain/card/ gold.dat
