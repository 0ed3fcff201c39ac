#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ mouse.cfg))) > box.md
