#!/bin/bash
set -eu
cd /workspace
mv horse.log bird/
