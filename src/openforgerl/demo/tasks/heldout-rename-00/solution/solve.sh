#!/bin/bash
set -eu
cd /workspace
mv field.dat egg.cfg
