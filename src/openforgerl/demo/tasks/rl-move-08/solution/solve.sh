#!/bin/bash
set -eu
cd /workspace
mv road.cfg hand/
