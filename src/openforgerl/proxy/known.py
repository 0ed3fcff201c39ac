"""The calls of one session that a later one may continue, in memory that grows with what is new in each.

Every prompt holds the ids of all before it, so whole prompts would grow with the square of the turns. Here a prompt is
kept as the store keeps it: how much of an earlier call's prompt and answer it repeats, and what follows.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Mapping

import msgspec

from openforgerl.store.packing import common_prefix
from openforgerl.types import ModelCall, OriginSpan, PlacedImage, Prompt

_NOTHING = Prompt(ids=())


class _Segment(msgspec.Struct, frozen=True):
    """A prompt: the first `common` ids of `base`'s prompt and answer, then `ids`; its origins and images likewise."""

    base: str | None
    common: int
    ids: array[int]
    common_origins: int
    origins: tuple[OriginSpan, ...]
    common_images: int
    images: tuple[PlacedImage, ...]
    template_digest: str


class KnownCalls(Mapping[str, ModelCall]):
    """Calls by id, in order of arrival, without raw bodies. Asking for one puts its prompt together again."""

    WHOLE = 4
    """How many whole prompts are kept: those asked for last, which the next call mostly continues."""

    def __init__(self) -> None:
        self._calls: dict[str, ModelCall] = {}
        """Without their prompts."""
        self._segments: dict[str, _Segment] = {}
        self._whole: dict[str, Prompt] = {}
        self._lock = threading.Lock()
        """Held while a prompt is put together: that is asked for in threads too."""

    def __getitem__(self, call_id: str) -> ModelCall:
        call = self._calls[call_id]
        return msgspec.structs.replace(call, prompt=self._prompt(call_id))

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def light(self) -> tuple[ModelCall, ...]:
        """All calls with everything but their prompts."""
        return tuple(self._calls.values())

    def lightly(self, call_id: str) -> ModelCall | None:
        """One of them, or None."""
        return self._calls.get(call_id)

    @property
    def ids_held(self) -> int:
        """Prompt ids in memory."""
        return sum(len(kept.ids) for kept in self._segments.values()) + sum(
            len(prompt.ids) for prompt in self._whole.values()
        )

    def put(self, call: ModelCall) -> None:
        """Keep the newest state of a call; its prompt never changes."""
        if call.call_id not in self._segments:
            self._segments[call.call_id] = self._segment(call)
            with self._lock:
                self._keep_whole(call.call_id, call.prompt)
        self._calls[call.call_id] = msgspec.structs.replace(call, request=None, response=None, prompt=_NOTHING)

    def forget(self, call_id: str) -> None:
        """Drop a call. What other calls share with its prompt stays."""
        self._calls.pop(call_id, None)

    def clear(self) -> None:
        """Drop all."""
        self._calls.clear()
        self._segments.clear()
        self._whole.clear()

    def _segment(self, call: ModelCall) -> _Segment:
        prompt = call.prompt
        base = call.parent_call_id if call.parent_call_id in self._segments else next(iter(self._segments), None)
        known = _NOTHING if base is None else self._prompt(base)
        answer = self._calls[base].sampled_ids if base in self._calls else ()
        common = common_prefix((*known.ids, *answer), prompt.ids)
        origins = _alike(known.origins, prompt.origins)
        images = _alike(known.images, prompt.images)
        return _Segment(
            base=base,
            common=common,
            ids=array("q", prompt.ids[common:]),
            common_origins=origins,
            origins=prompt.origins[origins:],
            common_images=images,
            images=prompt.images[images:],
            template_digest=prompt.template_digest,
        )

    def _prompt(self, call_id: str) -> Prompt:
        with self._lock:
            return self._joined(call_id)

    def _joined(self, call_id: str) -> Prompt:
        """The whole prompt, from the nearest one that is kept whole."""
        path: list[str] = []
        at: str | None = call_id
        while at is not None and at not in self._whole:
            path.append(at)
            at = self._segments[at].base
        start = _NOTHING if at is None else self._whole[at]
        ids, origins, images = list(start.ids), list(start.origins), list(start.images)
        for name in reversed(path):
            kept = self._segments[name]
            if kept.base is not None and kept.common > len(ids):
                ids += self._calls[kept.base].sampled_ids[: kept.common - len(ids)]
            del ids[kept.common :], origins[kept.common_origins :], images[kept.common_images :]
            ids += kept.ids
            origins += kept.origins
            images += kept.images
        if path:
            digest = self._segments[call_id].template_digest
            start = Prompt(ids=tuple(ids), origins=tuple(origins), images=tuple(images), template_digest=digest)
        self._keep_whole(call_id, start)
        return start

    def _keep_whole(self, call_id: str, prompt: Prompt) -> None:
        self._whole.pop(call_id, None)
        self._whole[call_id] = prompt
        while len(self._whole) > self.WHOLE:
            del self._whole[next(iter(self._whole))]


class Restorable(Mapping[int, ModelCall]):
    """Calls by place in a history, each put together when it is asked for: a history may repeat a thousand."""

    def __init__(self, known: KnownCalls, call_ids: Mapping[int, str]) -> None:
        self._known = known
        self._call_ids = dict(call_ids)

    def __getitem__(self, message: int) -> ModelCall:
        return self._known[self._call_ids[message]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._call_ids)

    def __len__(self) -> int:
        return len(self._call_ids)


def _alike(left: tuple[object, ...], right: tuple[object, ...]) -> int:
    """How many leading entries are equal."""
    most = min(len(left), len(right))
    if left[:most] == right[:most]:
        return most
    return next(at for at in range(most) if left[at] != right[at])
