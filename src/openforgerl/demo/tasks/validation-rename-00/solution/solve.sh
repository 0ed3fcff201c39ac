#!/bin/bash
set -eu
cd /workspace
mv duck.dat key.dat
