#!/bin/bash
set -eu
cd /workspace
rm girl.cfg cart.cfg
