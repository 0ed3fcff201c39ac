#!/bin/bash
set -eu
cd /workspace
sort pear.dat > leaf.log
