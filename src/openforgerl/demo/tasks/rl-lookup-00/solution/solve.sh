#!/bin/bash
set -eu
cd /workspace
printf '%s' brick > horse.cfg
