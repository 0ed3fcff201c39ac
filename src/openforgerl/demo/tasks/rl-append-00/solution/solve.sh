#!/bin/bash
set -eu
cd /workspace
echo kite >> bell.cfg
