#!/bin/bash
set -eu
cd /workspace
printf '%s' gold > road.dat
