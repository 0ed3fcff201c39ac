#!/bin/bash
set -eu
cd /workspace
mv lamp.dat nail.cfg
