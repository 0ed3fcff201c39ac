#!/bin/bash
set -eu
cd /workspace
sed -i s/road/fox/ dog.csv
