#!/bin/bash
set -eu
cd /workspace
printf '%s' hill > rain.cfg
