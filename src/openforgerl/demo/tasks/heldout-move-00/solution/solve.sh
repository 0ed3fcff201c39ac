#!/bin/bash
set -eu
cd /workspace
mv cook.cfg bank/
