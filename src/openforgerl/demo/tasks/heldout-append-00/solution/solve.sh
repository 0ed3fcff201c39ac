#!/bin/bash
set -eu
cd /workspace
echo hand >> field.cfg
