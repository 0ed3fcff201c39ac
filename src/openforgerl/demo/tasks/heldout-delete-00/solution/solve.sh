#!/bin/bash
set -eu
cd /workspace
rm bag.log chair.cfg
