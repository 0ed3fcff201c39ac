#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ field.md))) > desk.csv
