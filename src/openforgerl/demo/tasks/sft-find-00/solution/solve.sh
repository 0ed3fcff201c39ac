#!/bin/bash
set -eu
cd /workspace
grep -l bear *
printf '%s' pen.log > crow.cfg
