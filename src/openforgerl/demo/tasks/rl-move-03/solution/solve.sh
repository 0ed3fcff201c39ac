#!/bin/bash
set -eu
cd /workspace
mv box.cfg plant/
