#!/bin/bash
set -eu
cd /workspace
wc -l < pear.log > drum.log
