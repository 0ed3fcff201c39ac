#!/bin/bash
set -eu
cd /workspace
mv chair.csv book.log
