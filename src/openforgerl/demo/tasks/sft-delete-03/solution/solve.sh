#!/bin/bash
set -eu
cd /workspace
rm king.md house.cfg
