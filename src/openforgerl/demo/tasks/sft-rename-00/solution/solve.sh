#!/bin/bash
set -eu
cd /workspace
mv pear.cfg bike.log
