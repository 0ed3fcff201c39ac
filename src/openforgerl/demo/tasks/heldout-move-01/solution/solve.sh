#!/bin/bash
set -eu
cd /workspace
mv goat.dat kite/
