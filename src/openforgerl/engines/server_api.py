"""What vLLM's and SGLang's servers are asked and how they answer: bodies and events, without any I/O.

Read in vLLM 0.32 (`entrypoints/openai/completion`, `entrypoints/scale_out/token_in_token_out`) and SGLang 0.5.23
(`managers/io_struct.py`, `managers/tokenizer_manager.py`, `multimodal/processors/base_processor.py`). Both take a
prompt as ids and give every sampled id with its log-prob; images go beside ids in which each has one placeholder, and
both say with which ids they began.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from openforgerl.engines.continuing import MOST_SEED, Answer
from openforgerl.errors import EngineError
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
    prompt_ids: tuple[int, ...] | None = None
    """The prompt as the server read it, where it says so: it places an image's placeholders itself."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One request: an answer's, or one of a weight update."""

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
    image_fix: str
    """How to start the server so that it takes images beside ids."""

    def request(self, asked: Answer, stop_ids: Sequence[int], scope: Scope) -> Step:
        """What asks for the rest of an answer, streamed. With images the server says how it read the prompt."""
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


class VllmApi:
    """vLLM: `/v1/completions` with ids, which needs no flag of the server's, and for prompts with images its own
    `/inference/v1/generate`, which needs one."""

    name = "vllm"
    generate_path = "/v1/completions"
    health_path = "/health"
    logprob_fix = "--logprobs-mode processed_logprobs"
    image_path = "/inference/v1/generate"
    image_fix = "--enable-scale-out (vLLM 0.32 or later)"

    def request(self, asked: Answer, stop_ids: Sequence[int], scope: Scope) -> Step:
        """Every parameter is given: the server would fill in those of the model's generation config."""
        sampling = asked.rest
        params: Body = {
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
            "skip_special_tokens": False,
            **_seed("seed", sampling),
        }
        body: Body = {"model": scope.model, "return_token_ids": True, "stream": True}
        if not asked.images:
            return Step(path=self.generate_path, body=body | params | {"prompt": asked.ids})
        parts = [{"type": "image_url", "url": _data_url(data)} for data in asked.images]
        body |= {"token_ids": asked.collapsed, "content_parts": parts, "sampling_params": params}
        return Step(path=self.image_path, body=body, needs=self.image_fix)

    def piece(self, event: Any, seen: int) -> Piece:
        """Events of both paths: they name log-probs differently."""
        del seen
        if "error" in event:
            return _failed(event["error"])
        try:
            if not event["choices"]:
                return Piece()
            (choice,) = event["choices"]
            ids = tuple(choice.get("token_ids") or ())
            told = choice.get("logprobs") or {}
            logprobs = told.get("token_logprobs") or [one["logprob"] for one in told.get("content") or ()]
            finish = choice.get("finish_reason") or ""
            read = event.get("prompt_token_ids")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Unreadable(f"{event!r:.300}") from error
        prompt = None if read is None else tuple(read)
        return Piece(ids=ids, logprobs=_logprobs(ids, logprobs), finish=finish, prompt_ids=prompt)

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
    image_fix = "SGLANG_MM_AVOID_RETOKENIZE=true (SGLang 0.5.23 or later)"

    def request(self, asked: Answer, stop_ids: Sequence[int], scope: Scope) -> Step:
        sampling = asked.rest
        body: Body = {
            "input_ids": asked.collapsed,
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
                **_seed("sampling_seed", sampling),
            },
            "return_logprob": True,
            "session_id": scope.session,
            "stream": True,
        }
        if asked.images:
            body |= {"image_data": [_data_url(data) for data in asked.images], "return_prompt_token_ids": True}
        return Step(path=self.generate_path, body=body, needs=self.image_fix if asked.images else "")

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
            read = event.get("prompt_token_ids")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise Unreadable(f"{event!r:.300}") from error
        prompt = None if read is None else tuple(read)
        return Piece(ids=ids, logprobs=_logprobs(ids, logprobs), finish=finish, prompt_ids=prompt)

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


def check_prompt(read: Sequence[int] | None, asked: Sequence[int], name: str) -> None:
    """EngineError 400 unless a server read a prompt with images as the ids that it stands for here.

    Both kinds of server place an image's placeholders themselves, and SGLang may tokenise the text again: then what
    was sampled answers other ids than those that would be trained.
    """
    if read is None:
        raise EngineError(
            f"{name} does not say how it read a prompt with images, so nothing vouches for it", status=400
        )
    if tuple(read) != tuple(asked):
        at = next((at for at, (one, other) in enumerate(zip(read, asked, strict=False)) if one != other), -1)
        where = f"differ from place {at} on" if at >= 0 else "end elsewhere"
        raise EngineError(
            f"{name} read a prompt with images as {len(read)} ids, where {len(asked)} were meant; they {where}: its "
            "image processor has other settings than preprocessor_config.json here, or it tokenised the text again",
            status=400,
        )


def _data_url(data: bytes) -> str:
    """An image as servers take it; they look at the bytes for its format, not at this name."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _seed(name: str, sampling: Sampling) -> Body:
    return {} if sampling.seed is None else {name: sampling.seed & MOST_SEED}


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
