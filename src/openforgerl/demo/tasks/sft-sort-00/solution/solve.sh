#!/bin/bash
set -eu
cd /workspace
sort camp.log > bag.md
