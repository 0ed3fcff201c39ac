"""What a server is and what it lacks, asked once before anything runs. Blocking: nothing runs yet."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import msgspec

from openforgerl.engines.server_api import ServerApi, Unreadable
from openforgerl.errors import ConfigError

_PROBE_IDS = (1, 2, 3)
"""Any short prompt does: only ratios of log-probs are looked at."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself."""

    model: str
    context_length: int
    at_temperature: bool
    """Its log-probs are those of the distribution that it samples from; else of temperature 1."""


def probe(url: str, api: ServerApi, headers: Mapping[str, str], timeout: float) -> Served:
    """Ask the server at `url`. ConfigError names what it lacks and how to start it."""
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
    return Served(model=model, context_length=length, at_temperature=_halved(tops[0], tops[1]))


def _halved(at_one: list[float], at_two: list[float]) -> bool:
    """Whether the gap between the two likeliest ids is at temperature 2 half of what it is at 1."""
    if len(at_one) < 2 or len(at_two) < 2:
        return False
    one, two = at_one[0] - at_one[1], at_two[0] - at_two[1]
    return abs(two - one / 2) < abs(two - one) or one == two == 0


def _call(url: str, body: Any, headers: Mapping[str, str], timeout: float) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace")
        raise ConfigError(f"{url} answers {error.code}: {said}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{url} cannot be reached: {error}; is the server up?") from error
