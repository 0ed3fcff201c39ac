#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ field.txt))) > bird.log
