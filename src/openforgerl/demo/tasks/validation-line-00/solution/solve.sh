#!/bin/bash
set -eu
cd /workspace
sed -n 3p drum.csv > pig.cfg
