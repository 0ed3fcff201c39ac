#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ cow.md))) > drum.log
