"""One run of pi against a scripted model, at installation: proof that it works, and a warm compile cache.

Node compiles pi's bundle on every start unless it finds a compile cache. The cache is made portable (keyed by
paths relative to itself), so that the same directory serves at another place inside a sandbox, read-only.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.harnesses.node import NodeRuntime
from openforgerl.harnesses.options import PiOptions
from openforgerl.harnesses.pi_config import ENTRY, arguments, models_file, settings_file
from openforgerl.types import JsonValue

COMPILE_CACHE = "compile-cache"
ANSWER = "Trial passed."
TIMEOUT = 300.0
"""Seconds."""


class _Script(BaseHTTPRequestHandler):
    """First a bash call, then `ANSWER`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", "0"))
        messages = json.loads(self.rfile.read(length))["messages"]
        answered = messages[-1]["role"] == "tool"
        function = {"name": "bash", "arguments": '{"command": "echo tried > trial.txt"}'}
        call = {"index": 0, "id": "call0", "type": "function", "function": function}
        delta: dict[str, JsonValue] = {"content": ANSWER} if answered else {"tool_calls": [call]}
        body = "".join(
            f"data: {json.dumps(chunk)}\n\n"
            for chunk in (
                _chunk({"role": "assistant", **delta}, None),
                _chunk({}, "stop" if answered else "tool_calls"),
            )
        )
        data = (body + "data: [DONE]\n\n").encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the installer reports."""


def _chunk(delta: dict[str, JsonValue], finish: str | None) -> dict[str, JsonValue]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "policy", "choices": [choice]}


def try_pi(node: NodeRuntime, directory: Path) -> None:
    """Run the pi in `directory`; `InputError` when it does not do what it is told."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Script)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            _run(node, directory, Path(scratch), f"http://127.0.0.1:{server.server_address[1]}/v1")
    finally:
        server.shutdown()
        server.server_close()


def _run(node: NodeRuntime, directory: Path, scratch: Path, base_url: str) -> None:
    agent = scratch / ".pi" / "agent"
    agent.mkdir(parents=True)
    (agent / "models.json").write_text(
        models_file(base_url=base_url, key="trial", context_length=32768, max_output_tokens=512)
    )
    (agent / "settings.json").write_text(settings_file(context_length=32768, max_output_tokens=512))
    argv, stdin = arguments(PiOptions(), "Try.")
    done = subprocess.run(
        [node.binary, str(directory / ENTRY), *argv],
        cwd=scratch,
        input=stdin.encode(),
        capture_output=True,
        timeout=TIMEOUT,
        umask=0o022,
        check=False,
        env={
            "PATH": os.defpath,
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            "PI_OFFLINE": "1",
            "NODE_COMPILE_CACHE": str(directory / COMPILE_CACHE),
            "NODE_COMPILE_CACHE_PORTABLE": "1",
        },
    )
    said = done.stdout.decode(errors="replace").strip()
    if done.returncode != 0 or said != ANSWER or not (scratch / "trial.txt").is_file():
        raise InputError(
            f"pi is installed but its trial run failed: exit {done.returncode}, output {said[-300:]!r}, "
            f"errors {done.stderr[-1000:].decode(errors='replace').strip()!r}"
        )
