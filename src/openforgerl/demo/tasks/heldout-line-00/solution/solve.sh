#!/bin/bash
set -eu
cd /workspace
sed -n 3p dress.csv > hand.cfg
