#!/bin/bash
set -eu
cd /workspace
cp mouse.csv bag/
