#!/bin/bash
set -eu
cd /workspace
printf '%s' bell > nail.dat
