#!/bin/bash
set -eu
cd /workspace
printf '%s' chair > hand.dat
