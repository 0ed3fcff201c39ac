#!/bin/bash
set -eu
cd /workspace
grep -l shoe *
printf '%s' ship.log > field.log
