#!/bin/bash
set -eu
cd /workspace
sort bank.dat > moon.dat
