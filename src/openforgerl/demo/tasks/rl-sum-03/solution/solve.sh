#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ gate.md))) > fork.cfg
