#!/bin/bash
set -eu
cd /workspace
printf '%s' river > rain.cfg
