#!/bin/bash
set -eu
cd /workspace
wc -l < onion.cfg > key.log
