#!/bin/bash
set -eu
cd /workspace
cp arm.dat door.log
