#!/bin/bash
set -eu
cd /workspace
printf '%s' 'crow house' > field.md
