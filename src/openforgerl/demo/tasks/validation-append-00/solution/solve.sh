#!/bin/bash
set -eu
cd /workspace
echo goat >> iron.log
