#!/bin/bash
set -eu
cd /workspace
echo plant >> hand.cfg
