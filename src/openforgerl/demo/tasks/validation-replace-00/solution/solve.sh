#!/bin/bash
set -eu
cd /workspace
sed -i s/ball/drum/ map.log
