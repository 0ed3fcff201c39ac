#!/bin/bash
set -eu
cd /workspace
sed -n 2p key.cfg > horse.csv
