"""What one call of a long conversation costs the proxy, beside reading its body and rendering its template.

    OMP_NUM_THREADS=1 python benchmarks/call_cost.py [--turns 1000] [--dialect chat] [--profile]

One session's conversation grows by a thought, a sentence, a tool call and the tool's result a turn. Every request
brings the whole history, as harnesses do, and goes through the dialect, the attribution, the renderer and a real
store; only HTTP is left out, and the engine is scripted. CPU seconds are the process's own, all threads. The yardstick
of a call is `json.loads` of its body and one plain jinja rendering of its conversation, both timed in the same run,
at the same turns.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from openforgerl.engines.script import Script
from openforgerl.engines.scripted import ScriptedEngine
from openforgerl.proxy.exchange import Arrival, Exchange, Gateway
from openforgerl.proxy.options import ProxyOptions
from openforgerl.proxy.sessions import LiveSession, SessionRegistry
from openforgerl.rendering import load_renderer
from openforgerl.store import CallStore, Database
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import Limits, Sampling
from openforgerl.wire import ChatDialect, Dialect, GeminiDialect, MessagesDialect, ResponsesDialect

TEXT = "the file holds nine lines of text and the third one names a folder that is empty by now so look again"
WORDS = TEXT.split()
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does what {name} does, with the usual care.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
    for name in ("bash", "read", "write", "edit")
]


def words(seed: int, count: int) -> str:
    """Text that differs from turn to turn."""
    return " ".join(WORDS[(seed * 7 + at * at) % len(WORDS)] for at in range(count)) + f" {seed}"


class Outlet:
    """A client that keeps the whole answer."""

    def __init__(self) -> None:
        self.body = b""

    async def write(self, piece: bytes) -> None:
        self.body += piece

    async def whole(self, body: bytes) -> None:
        self.body = body

    async def fail(self, error: Exception, event: bytes, *, patient: bool = True) -> None:
        raise error


@dataclass(frozen=True)
class Cost:
    """CPU seconds at one turn."""

    turn: int
    characters: int
    call: float
    loads: float
    jinja: float

    @property
    def ratio(self) -> float:
        """Of the call, to the yardstick."""
        return self.call / (self.loads + self.jinja)


def cpu(work: Callable[[], Any], repeats: int = 5) -> float:
    """CPU seconds of `work`, the median of some."""
    taken: list[float] = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


class Harness:
    """What a harness that speaks chat completions sends, and what it adds to its history."""

    dialect: Dialect = ChatDialect()

    def __init__(self) -> None:
        self.said = [
            {"role": "system", "content": words(0, 200)},
            {"role": "user", "content": words(1, 60)},
        ]
        """The conversation as chat templates know it: the yardstick is rendered from it."""
        self.history: list[Any] = self.opening()

    def opening(self) -> list[Any]:
        """The history before the first answer."""
        return list(self.said)

    def body(self) -> bytes:
        """The next request."""
        return json.dumps({"model": "policy", "messages": self.history, "tools": TOOLS}).encode()

    def take(self, answer: bytes, turn: int) -> None:
        """The answer and the tool's result."""
        result = words(turn, 60)
        calls = self.answered(json.loads(answer), result)
        arguments = [{"function": {"name": name, "arguments": given}} for name, given in calls]
        said = {"role": "assistant", "content": words(4, 8), "reasoning_content": words(3, 25), "tool_calls": arguments}
        self.said += [said, *({"role": "tool", "content": result} for _ in calls)]

    def answered(self, answer: Any, result: str) -> list[tuple[str, Any]]:
        """Add an answer and its tool's result to the history; the calls as (name, arguments)."""
        message = answer["choices"][0]["message"]
        self.history.append(message)
        calls = message["tool_calls"]
        self.history += [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]
        return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


class MessagesHarness(Harness):
    """One that speaks Anthropic Messages."""

    dialect = MessagesDialect()

    def opening(self) -> list[Any]:
        return self.said[1:]

    def body(self) -> bytes:
        tools = [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
            for f in (tool["function"] for tool in TOOLS)
        ]
        system = self.said[0]["content"]
        return json.dumps(
            {"model": "policy", "max_tokens": 4000, "system": system, "messages": self.history, "tools": tools}
        ).encode()

    def answered(self, answer: Any, result: str) -> list[tuple[str, Any]]:
        self.history.append({"role": "assistant", "content": answer["content"]})
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": result} for call in calls]
        self.history.append({"role": "user", "content": results})
        return [(call["name"], call["input"]) for call in calls]


class ResponsesHarness(Harness):
    """One that speaks OpenAI Responses, and sends its history whole."""

    dialect = ResponsesDialect()

    def opening(self) -> list[Any]:
        return self.said[1:]

    def body(self) -> bytes:
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        instructions = self.said[0]["content"]
        return json.dumps(
            {"model": "policy", "instructions": instructions, "input": self.history, "tools": tools, "store": False}
        ).encode()

    def answered(self, answer: Any, result: str) -> list[tuple[str, Any]]:
        self.history += answer["output"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        self.history += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": result} for call in calls
        ]
        return [(call["name"], json.loads(call["arguments"])) for call in calls]


class GeminiHarness(Harness):
    """One that speaks Gemini."""

    dialect = GeminiDialect()

    def opening(self) -> list[Any]:
        return [{"role": "user", "parts": [{"text": self.said[1]["content"]}]}]

    def body(self) -> bytes:
        declared = [{"functionDeclarations": [tool["function"] for tool in TOOLS]}]
        system = {"parts": [{"text": self.said[0]["content"]}]}
        return json.dumps({"systemInstruction": system, "contents": self.history, "tools": declared}).encode()

    def answered(self, answer: Any, result: str) -> list[tuple[str, Any]]:
        content = answer["candidates"][0]["content"]
        self.history.append(content)
        calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
        results = [
            {"functionResponse": {"id": call["id"], "name": call["name"], "response": {"output": result}}}
            for call in calls
        ]
        self.history.append({"role": "user", "parts": results})
        return [(call["name"], call["args"]) for call in calls]


HARNESSES = {kind.dialect.name: kind for kind in (Harness, MessagesHarness, ResponsesHarness, GeminiHarness)}


async def one_call(gateway: Gateway, session: LiveSession, dialect: Dialect, body: bytes) -> bytes:
    """A request from its bytes to the last byte of its answer."""
    request = dialect.parse(body, memory=session)
    session.admit()
    arrival = Arrival(call_id=uuid.uuid4().hex, request=request, headers={}, received=time.time())
    outlet = Outlet()
    await Exchange(gateway, session, dialect, arrival, outlet).run()
    return outlet.body


def plain_template(source: str) -> jinja2.Template:
    """A chat template in the environment that transformers renders it in, without anything of ours."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)


def yardstick(template: jinja2.Template, body: bytes, said: list[dict[str, Any]]) -> tuple[float, float]:
    """CPU seconds of `json.loads` of the body, and of one plain rendering of what it holds."""
    variables = {"messages": said, "tools": TOOLS, "add_generation_prompt": True}
    return cpu(lambda: json.loads(body)), cpu(lambda: template.render(variables))


async def measure(folder: Path, name: str, turns: int, at: list[int], profile: bool) -> list[Cost]:
    """One conversation of so many turns, measured at some of them."""
    model = write_tiny_model(folder / "model")
    renderer = load_renderer(model)
    template = plain_template((model / "chat_template.jinja").read_text("utf-8"))
    said = {
        "reasoning": words(3, 25),
        "text": words(4, 8),
        "tool_calls": [{"name": "bash", "arguments": {"command": "sed -n 1,20p notes.txt && ls -la"}}],
        "times": turns,
    }
    engine = ScriptedEngine(Script.decode(json.dumps({"answers": [said]})), renderer, context_length=10**9)
    found: list[Cost] = []
    profiler = cProfile.Profile()
    async with Database.open(folder / "run.sqlite") as database:
        store = CallStore(database)
        sessions = SessionRegistry(store)
        gateway = Gateway(
            engine=engine,
            renderer=renderer,
            store=store,
            sessions=sessions,
            options=ProxyOptions(),
            dialects={name: HARNESSES[name].dialect},
        )
        session, _ = await sessions.open(
            "s", sampling=Sampling(max_tokens=4000), limits=Limits(calls=None), metadata={}, template_kwargs={}
        )
        harness = HARNESSES[name]()
        for turn in range(1, turns + 1):
            body = harness.body()
            near = any(abs(turn - mark) <= 2 for mark in at)
            if profile and near:
                profiler.enable()
            start = time.process_time()
            answer = await one_call(gateway, session, harness.dialect, body)
            taken = time.process_time() - start
            profiler.disable()
            if near:
                found.append(Cost(turn, len(body), taken, *yardstick(template, body, harness.said)))
            harness.take(answer, turn)
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    return found


def main() -> None:
    """Print one line for each of the turns measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--dialect", choices=HARNESSES, help="only this one, not all four")
    parser.add_argument("--profile", action="store_true", help="where the time of the measured calls goes")
    given = parser.parse_args()
    marks = [given.turns] if given.profile else sorted({given.turns // part for part in (8, 4, 2, 1)})
    print("dialect     turn   body kB   call ms   json.loads ms   jinja ms   call / (loads + jinja)")
    for name in [given.dialect] if given.dialect else HARNESSES:
        with tempfile.TemporaryDirectory() as folder:
            costs = asyncio.run(measure(Path(folder), name, given.turns, marks, given.profile))
        for mark in marks:
            near = [cost for cost in costs if abs(cost.turn - mark) <= 2]
            shown = sorted(near, key=lambda cost: cost.ratio)[len(near) // 2]
            print(
                f"{name:10} {mark:5} {shown.characters / 1e3:9.0f} {shown.call * 1e3:9.1f} {shown.loads * 1e3:15.1f} "
                f"{shown.jinja * 1e3:10.1f} {shown.ratio:23.1f}"
            )


if __name__ == "__main__":
    main()
