#!/bin/bash
set -eu
cd /workspace
wc -l < girl.log > ring.cfg
