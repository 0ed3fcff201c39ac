#!/bin/bash
set -eu
cd /workspace
printf '%s' nest > cake.log
