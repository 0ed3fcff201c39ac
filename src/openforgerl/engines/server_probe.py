"""What a server is and what it lacks, asked once before anything runs. Blocking: nothing runs yet."""

from __future__ import annotations

import hashlib
import json
import struct
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec

from openforgerl.engines.continuing import Answer
from openforgerl.engines.server_api import Scope, ServerApi, Step, Unreadable, check_prompt
from openforgerl.errors import ConfigError, EngineError, TemplateError
from openforgerl.protocols import Renderer
from openforgerl.types import Conversation, Image, Message, Role, Sampling, Text
from openforgerl.wire import SseReader

_PROBE_IDS = (1, 2, 3)
"""Any short prompt does: only ratios of log-probs are looked at."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself."""

    model: str
    context_length: int
    at_temperature: bool
    """Its log-probs are those of the distribution that it samples from; else of temperature 1."""
    blind: str = ""
    """Why it cannot be shown images; empty when it can, or when the model sees none."""


def glance(renderer: Renderer) -> Answer | None:
    """A question about an image, as the model's own template writes it; None for a model that sees none."""
    data = _grey_png(64)
    name = hashlib.sha256(data).hexdigest()
    message = Message(role=Role.USER, parts=(Image(name, "image/png"), Text("What is it?")))
    try:
        prompt = renderer.render(
            Conversation(messages=(message,)), restored={}, clock=0.0, kwargs={}, images={name: data}
        )
    except TemplateError:
        return None
    if not prompt.images:
        return None
    return Answer.begin(prompt, Sampling(max_tokens=1), context=len(prompt.ids) + 1, images={name: data})


def probe(
    url: str, api: ServerApi, headers: Mapping[str, str], timeout: float, *, look: Answer | None = None
) -> Served:
    """Ask the server at `url`, with `look` about an image too. ConfigError names what it lacks and how to start it."""
    listed = _call(url + "/v1/models", None, headers, timeout)
    try:
        card = listed["data"][0]
        model, length = str(card["id"]), int(card["max_model_len"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{url}/v1/models names no model with max_model_len: is it {api.name}?") from error
    tops: list[list[float]] = []
    for temperature in (1.0, 2.0):
        answer = _call(url + api.generate_path, api.probe(_PROBE_IDS, temperature, model), headers, timeout)
        try:
            tops.append(api.probed(answer)[:2])
        except Unreadable as error:
            raise ConfigError(f"{url}{api.generate_path} does not answer as {api.name} does: {error}") from error
    blind = "" if look is None else _blind(url, api, look, model, headers, timeout)
    return Served(model=model, context_length=length, at_temperature=_halved(tops[0], tops[1]), blind=blind)


def _blind(url: str, api: ServerApi, look: Answer, model: str, headers: Mapping[str, str], timeout: float) -> str:
    """Why the server cannot answer `look`; empty when it can."""
    step: Step = api.request(look, (), Scope(model=model, session="probe"))
    try:
        events = SseReader().feed(_read(url + step.path, step.body, headers, timeout))
        pieces = [api.piece(json.loads(event.data), 0) for event in events if event.data.strip() != "[DONE]"]
        if error := next((piece.error for piece in pieces if piece.error), ""):
            return f"{error} (is it started with {step.needs}?)"
        read = next((piece.prompt_ids for piece in pieces if piece.ids or piece.finish), None)
        check_prompt(read, look.ids, api.name)
    except (ConfigError, EngineError) as error:
        return f"{error} (is it started with {step.needs}?)"
    except (Unreadable, ValueError) as error:
        return f"{url}{step.path} does not answer as {api.name} does: {error}"
    return ""


def _grey_png(side: int) -> bytes:
    """A grey square of `side` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">2I5B", side, side, 8, 2, 0, 0, 0)
    rows = (b"\x00" + b"\x80" * (3 * side)) * side
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _halved(at_one: list[float], at_two: list[float]) -> bool:
    """Whether the gap between the two likeliest ids is at temperature 2 half of what it is at 1."""
    if len(at_one) < 2 or len(at_two) < 2:
        return False
    one, two = at_one[0] - at_one[1], at_two[0] - at_two[1]
    return abs(two - one / 2) < abs(two - one) or one == two == 0


def _call(url: str, body: Any, headers: Mapping[str, str], timeout: float) -> Any:
    try:
        return json.loads(_read(url, body, headers, timeout))
    except ValueError as error:
        raise ConfigError(f"{url} does not answer in JSON: {error}") from error


def _read(url: str, body: Any, headers: Mapping[str, str], timeout: float) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace")
        raise ConfigError(f"{url} answers {error.code}: {said}") from error
    except OSError as error:
        raise ConfigError(f"{url} cannot be reached: {error}; is the server up?") from error
