#!/bin/bash
set -eu
cd /workspace
cp hat.log card.txt
