#!/bin/bash
set -eu
cd /workspace
sort bear.csv > shoe.log
