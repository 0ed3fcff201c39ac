#!/bin/bash
set -eu
cd /workspace
mv moon.log cart/
