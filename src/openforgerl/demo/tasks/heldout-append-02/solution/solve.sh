#!/bin/bash
set -eu
cd /workspace
echo plant >> boat.log
