#!/bin/bash
set -eu
cd /workspace
sort bean.log > bird.log
