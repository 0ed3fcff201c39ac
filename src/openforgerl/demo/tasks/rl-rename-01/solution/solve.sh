#!/bin/bash
set -eu
cd /workspace
mv frog.cfg hat.log
