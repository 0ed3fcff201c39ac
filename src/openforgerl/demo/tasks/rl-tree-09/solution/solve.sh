#!/bin/bash
set -eu
cd /workspace
mkdir -p mouse/flag
