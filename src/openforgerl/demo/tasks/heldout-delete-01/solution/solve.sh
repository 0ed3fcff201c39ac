#!/bin/bash
set -eu
cd /workspace
rm goat.dat queen.txt
