#!/bin/bash
set -eu
cd /workspace
sort rock.md > ball.txt
