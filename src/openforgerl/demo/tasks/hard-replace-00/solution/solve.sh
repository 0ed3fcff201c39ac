#!/bin/bash
set -eu
cd /workspace
sed -i s/flag/hand/ corn.log
