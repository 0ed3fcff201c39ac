#!/bin/bash
set -eu
cd /workspace
rm milk.log field.cfg
