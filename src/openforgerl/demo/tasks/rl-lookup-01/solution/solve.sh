#!/bin/bash
set -eu
cd /workspace
printf '%s' barn > dog.txt
