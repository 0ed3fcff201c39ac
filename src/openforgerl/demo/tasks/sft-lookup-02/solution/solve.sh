#!/bin/bash
set -eu
cd /workspace
printf '%s' rock > bike.dat
