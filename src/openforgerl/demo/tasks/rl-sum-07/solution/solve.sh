#!/bin/bash
set -eu
cd /workspace
echo $(($(paste -sd+ bell.log))) > rock.dat
