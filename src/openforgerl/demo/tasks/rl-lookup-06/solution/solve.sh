#!/bin/bash
set -eu
cd /workspace
printf '%s' bike > mouse.dat
