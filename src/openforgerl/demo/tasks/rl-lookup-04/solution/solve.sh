#!/bin/bash
set -eu
cd /workspace
printf '%s' fork > rock.log
