#!/bin/bash
set -eu
cd /workspace
sort cake.csv > door.cfg
