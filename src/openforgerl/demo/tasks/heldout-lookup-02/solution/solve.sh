#!/bin/bash
set -eu
cd /workspace
printf '%s' horse > ocean.cfg
