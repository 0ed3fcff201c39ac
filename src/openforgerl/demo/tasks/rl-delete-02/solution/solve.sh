#!/bin/bash
set -eu
cd /workspace
rm bowl.log coat.log
