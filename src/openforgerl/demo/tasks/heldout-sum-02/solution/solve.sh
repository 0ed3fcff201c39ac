#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ cow.cfg))) > pig.cfg
