#!/bin/bash
set -eu
cd /workspace
sort apple.dat > pen.txt
