#!/bin/bash
set -eu
cd /workspace
mv jar.dat hill/
