#!/bin/bash
set -eu
cd /workspace
rm hand.cfg corn.txt
