"""What vLLM's and SGLang's servers are asked and how they answer: bodies and events, without any I/O.

Read in vLLM 0.32 (`entrypoints/openai/completion`) and SGLang 0.5.23 (`managers/io_struct.py`,
`managers/tokenizer_manager.py`). Both take a prompt as ids and give every sampled id with its log-prob.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from openforgerl.types import Sampling

Body = dict[str, Any]
LOWEST = -9999.0
"""What vLLM writes for a log-prob of minus infinity or NaN, which JSON cannot hold."""


class Unreadable(Exception):
    """An answer that is not what this server should say."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one event of a stream adds."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    finish: str = ""
    """The server's word for why it ended; empty while it goes on."""
    error: str = ""
    status: int = 500
    """HTTP status that the server would give the error."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a weight update."""

    path: str
    body: Body = {}
    needs: str = ""
    """What the server must be started with for this to exist."""


class ServerApi(Protocol):
    """One kind of server."""

    name: str
    generate_path: str
    health_path: str
    logprob_fix: str
    """How to start the server so that log-probs are taken at the sampling temperature."""

    def request(self, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], scope: Scope) -> Body:
        """The body that asks for an answer to `ids`, streamed."""
        ...

    def piece(self, event: Any, seen: int) -> Piece:
        """What an event adds to an answer of which `seen` ids are known. Raises Unreadable."""
        ...

    def probe(self, ids: Sequence[int], temperature: float, model: str) -> Body:
        """A body that asks for one id and the log-probs of the two likeliest."""
        ...

    def probed(self, answer: Any) -> list[float]:
        """Log-probs of the likeliest ids, largest first. Raises Unreadable."""
        ...

    def pausing(self) -> list[Step]: ...
    def loading(self, weights: Path, version: int) -> list[Step]: ...
    def resuming(self) -> list[Step]: ...


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """What a request belongs to."""

    model: str
    session: str
    sampled: int = 0
    """Ids of this answer that an earlier request gave: a continued answer must not draw the same numbers again."""


class VllmApi:
    """vLLM: `/v1/completions` with ids, which needs no flag of the server's."""

    name = "vllm"
    generate_path = "/v1/completions"
    health_path = "/health"
    logprob_fix = "--logprobs-mode processed_logprobs"

    def request(self, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], scope: Scope) -> Body:
        """Every parameter is given: the server would fill in those of the model's generation config."""
        return {
            "model": scope.model,
            "prompt": list(ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(stop_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "stream": True,
            **_seed("seed", sampling, scope),
        }

    def piece(self, event: Any, seen: int) -> Piece:
        del seen
        if "error" in event:
            return _failed(event["error"])
        try:
            if not event["choices"]:
                return Piece()
            (choice,) = event["choices"]
            ids = tuple(choice.get("token_ids") or ())
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
            finish = choice.get("finish_reason") or ""
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Unreadable(f"{event!r:.300}") from error
        return Piece(ids=ids, logprobs=_logprobs(ids, logprobs), finish=finish)

    def probe(self, ids: Sequence[int], temperature: float, model: str) -> Body:
        return {
            "model": model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 2,
            "return_token_ids": True,
        }

    def probed(self, answer: Any) -> list[float]:
        try:
            (choice,) = answer["choices"]
            if not choice["token_ids"]:
                raise Unreadable("it returned no token ids (return_token_ids is not known to it: vLLM 0.10 or later)")
            return sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise Unreadable(f"{answer!r:.300}") from error

    def pausing(self) -> list[Step]:
        # Waiting, not keeping: an answer must not change its weights where nothing says at which id.
        return [Step(path="/pause?mode=wait", needs="VLLM_SERVER_DEV_MODE=1")]

    def loading(self, weights: Path, version: int) -> list[Step]:
        del version
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        return [
            Step(path="/collective_rpc", body=call, needs="VLLM_SERVER_DEV_MODE=1"),
            Step(path="/reset_prefix_cache", needs="VLLM_SERVER_DEV_MODE=1"),
        ]

    def resuming(self) -> list[Step]:
        return [Step(path="/resume", needs="VLLM_SERVER_DEV_MODE=1")]


class SglangApi:
    """SGLang: its own `/generate`."""

    name = "sglang"
    generate_path = "/generate"
    health_path = "/health"
    logprob_fix = "SGLANG_RETURN_ORIGINAL_LOGPROB unset"

    def request(self, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], scope: Scope) -> Body:
        return {
            "input_ids": list(ids),
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": 0.0,
                "presence_penalty": sampling.presence_penalty,
                "frequency_penalty": sampling.frequency_penalty,
                "repetition_penalty": sampling.repetition_penalty,
                "stop_token_ids": list(stop_ids),
                "ignore_eos": True,
                "skip_special_tokens": False,
                **_seed("sampling_seed", sampling, scope),
            },
            "return_logprob": True,
            "session_id": scope.session,
            "stream": True,
        }

    def piece(self, event: Any, seen: int) -> Piece:
        """Events hold the whole answer so far, or only what is new (`--incremental-streaming-output`)."""
        if "error" in event:
            return _failed(event["error"])
        try:
            meta: Mapping[str, Any] = event["meta_info"]
            rows = meta.get("output_token_logprobs") or ()
            ids = tuple(int(row[1]) for row in rows)
            logprobs = tuple(row[0] for row in rows)
            if seen and len(ids) == meta["completion_tokens"]:
                ids, logprobs = ids[seen:], logprobs[seen:]
            finish = str((meta.get("finish_reason") or {}).get("type") or "")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise Unreadable(f"{event!r:.300}") from error
        return Piece(ids=ids, logprobs=_logprobs(ids, logprobs), finish=finish)

    def probe(self, ids: Sequence[int], temperature: float, model: str) -> Body:
        del model
        return {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": -1},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }

    def probed(self, answer: Any) -> list[float]:
        try:
            return sorted((row[0] for row in answer["meta_info"]["output_top_logprobs"][0]), reverse=True)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise Unreadable(f"{answer!r:.300}") from error

    def pausing(self) -> list[Step]:
        # The update itself waits for what is running.
        return []

    def loading(self, weights: Path, version: int) -> list[Step]:
        body: Body = {"model_path": str(weights), "weight_version": str(version), "flush_cache": True}
        return [Step(path="/update_weights_from_disk", body=body)]

    def resuming(self) -> list[Step]:
        return []


def _seed(name: str, sampling: Sampling, scope: Scope) -> Body:
    return {} if sampling.seed is None else {name: (sampling.seed + scope.sampled) & 0x7FFFFFFF}


def _logprobs(ids: tuple[int, ...], values: Sequence[Any]) -> tuple[float, ...] | None:
    """One finite number for each id, or None: half of an answer's log-probs are no use to anybody."""
    if len(values) != len(ids):
        return None
    numbers = tuple(float(value) if isinstance(value, int | float) else LOWEST for value in values)
    return None if any(not value > LOWEST for value in numbers) else numbers


def _failed(error: Any) -> Piece:
    """An error in mid-stream: words, or a mapping with `message` and `code` (vLLM: an HTTP status)."""
    if not isinstance(error, Mapping):
        return Piece(error=str(error) or "an error without words")
    code: Any = error.get("code")
    message = str(error.get("message") or json.dumps(error)[:500])
    return Piece(error=message, status=code if isinstance(code, int) else 500)
