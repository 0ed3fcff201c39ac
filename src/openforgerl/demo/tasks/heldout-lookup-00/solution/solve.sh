#!/bin/bash
set -eu
cd /workspace
printf '%s' ball > hand.csv
