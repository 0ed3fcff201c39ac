#!/bin/bash
set -eu
cd /workspace
sed -i s/king/apple/ bird.md
