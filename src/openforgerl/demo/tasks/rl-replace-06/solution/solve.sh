#!/bin/bash
set -eu
cd /workspace
sed -i s/bread/card/ barn.cfg
