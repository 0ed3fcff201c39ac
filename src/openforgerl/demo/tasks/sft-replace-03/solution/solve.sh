#!/bin/bash
set -eu
cd /workspace
sed -i s/map/barn/ clock.md
