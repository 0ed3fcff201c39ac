#!/bin/bash
set -eu
cd /workspace
printf %d $(($(paste -sd+ queen.cfg))) > ship.dat
