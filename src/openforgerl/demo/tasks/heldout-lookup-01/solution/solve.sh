#!/bin/bash
set -eu
cd /workspace
printf '%s' boot > rain.cfg
