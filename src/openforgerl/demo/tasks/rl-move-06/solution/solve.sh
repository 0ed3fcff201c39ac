#!/bin/bash
set -eu
cd /workspace
mv bean.txt bowl/
