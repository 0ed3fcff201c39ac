#!/bin/bash
set -eu
cd /workspace
sed -i s/moon/bank/ ball.log
