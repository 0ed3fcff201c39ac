#!/bin/bash
set -eu
cd /workspace
sort bird.cfg > drum.dat
