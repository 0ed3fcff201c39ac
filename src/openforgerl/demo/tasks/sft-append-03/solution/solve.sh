#!/bin/bash
set -eu
cd /workspace
echo fork >> shoe.dat
