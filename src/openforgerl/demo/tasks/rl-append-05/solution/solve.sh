#!/bin/bash
set -eu
cd /workspace
echo crab >> lamp.log
