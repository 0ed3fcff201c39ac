#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ lake.txt))) > crab.log
