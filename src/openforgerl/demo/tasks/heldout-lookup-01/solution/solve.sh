#!/bin/bash
set -eu
cd /workspace
printf '%s' crow > shoe.cfg
