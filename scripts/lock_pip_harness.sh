#!/bin/sh
# Writes the lock of a harness that comes as Python packages, with uv (python -m pip install uv==0.13.9):
#   scripts/lock_pip_harness.sh mini-swe-agent 3.11 mini-swe-agent==2.4.6
#   scripts/lock_pip_harness.sh openhands 3.12 openhands-sdk==1.58.2 openhands-tools==1.58.2
# Linux wheels only. func-timeout is published as source only and needed by OpenHands' browser tools alone.
set -eu
name=$1 python=$2
shift 2
lock="$(dirname "$0")/../src/openforgerl/harnesses/locks/$name"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
printf '%s\n' "$@" > "$scratch/in.txt"
echo "func-timeout; python_version < '3'" > "$scratch/left_out.txt"
uv pip compile --python-version "$python" --python-platform x86_64-manylinux_2_28 --only-binary :all: \
    --generate-hashes --no-emit-index-url --no-annotate --no-header --quiet \
    --override "$scratch/left_out.txt" "$scratch/in.txt" -o "$scratch/out.txt"
mkdir -p "$lock"
{ echo "# Written by scripts/lock_pip_harness.sh $name $python $*"; cat "$scratch/out.txt"; } > "$lock/requirements.txt"
