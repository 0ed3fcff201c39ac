#!/bin/bash
set -eu
cd /workspace
printf '%s' bank > road.cfg
