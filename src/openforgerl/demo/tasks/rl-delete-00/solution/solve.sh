#!/bin/bash
set -eu
cd /workspace
rm cake.dat girl.cfg
