#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ band.cfg))) > shoe.md
