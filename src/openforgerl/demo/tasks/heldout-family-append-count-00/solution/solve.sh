#!/bin/bash
set -eu
cd /workspace
wc -l < bowl.log >> map.log
