#!/bin/bash
set -eu
cd /workspace
sed -n 8p duck.log > hand.log
