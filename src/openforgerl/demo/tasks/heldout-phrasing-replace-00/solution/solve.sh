#!/bin/bash
set -eu
cd /workspace
sed -i s/barn/dress/ hat.log
