#!/bin/bash
set -eu
cd /workspace
printf '%s' cup > house.dat
