#!/bin/bash
set -eu
cd /workspace
echo onion >> brick.csv
