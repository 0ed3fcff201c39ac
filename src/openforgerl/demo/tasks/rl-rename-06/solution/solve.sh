#!/bin/bash
set -eu
cd /workspace
mv band.log boat.txt
