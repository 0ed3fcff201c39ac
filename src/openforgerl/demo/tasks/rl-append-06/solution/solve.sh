#!/bin/bash
set -eu
cd /workspace
echo drum >> rock.log
