#!/bin/bash
set -eu
cd /workspace
sort house.cfg > crow.cfg
