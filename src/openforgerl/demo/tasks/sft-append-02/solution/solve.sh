#!/bin/bash
set -eu
cd /workspace
echo cake >> nest.log
