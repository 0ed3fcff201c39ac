#!/bin/bash
set -eu
cd /workspace
mv dress.dat nail.log
