#!/bin/bash
set -eu
cd /workspace
printf '%s' 'queen road' > pen.log
