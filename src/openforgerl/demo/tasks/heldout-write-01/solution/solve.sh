#!/bin/bash
set -eu
cd /workspace
printf '%s' 'grass camp' > hat.dat
