#!/bin/bash
set -eu
cd /workspace
printf '%s' 'bread lion' > corn.dat
