#!/bin/bash
set -eu
cd /workspace
sort queen.csv > ring.cfg
