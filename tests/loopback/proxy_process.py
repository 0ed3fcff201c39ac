"""A proxy in a process of its own: `python proxy_process.py RUN_FOLDER MODEL_DIR SCRIPT_JSON`.

Prints its addresses, one JSON line, and serves until its standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from openforgerl.engines.script import Script
from openforgerl.engines.scripted import ScriptedEngine
from openforgerl.proxy import ProxyOptions, ProxyServer
from openforgerl.rendering import load_renderer
from openforgerl.store import CallStore, Database


async def serve(folder: Path, model: Path, script: Script) -> None:
    renderer = load_renderer(model)
    async with (
        Database.open(folder / "run.sqlite") as database,
        ProxyServer(
            engine=ScriptedEngine(script, renderer),
            renderer=renderer,
            store=CallStore(database),
            options=ProxyOptions(control_token_file=str(folder / "control.token")),
        ) as proxy,
    ):
        print(json.dumps({"data": proxy.data_address, "control": proxy.control_address}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2]), Script.decode(sys.argv[3])))
