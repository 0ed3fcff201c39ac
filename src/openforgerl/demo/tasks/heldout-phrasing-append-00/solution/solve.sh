#!/bin/bash
set -eu
cd /workspace
echo fork >> dish.cfg
