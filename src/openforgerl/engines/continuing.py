"""An answer that more than one request samples: a server breaks off or changes its weights, and the next request goes
on from the ids that are there. What every engine over somebody's servers shares. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from openforgerl.errors import EngineError
from openforgerl.types import Prompt, Sampling

MOST_SEED = 0x7FFFFFFF
"""Servers take seeds of 31 bits."""


@dataclass(slots=True)
class Answer:
    """An answer while it is sampled."""

    prompt: Prompt
    sampling: Sampling
    """As asked of the whole answer."""
    most: int
    """Tokens at most, by what was asked and by the context."""
    images: tuple[bytes, ...] = ()
    """Those that the prompt places, in order of appearance."""
    sampled: list[int] = field(default_factory=list[int])

    @classmethod
    def begin(
        cls, prompt: Prompt, sampling: Sampling, *, context: int, images: Mapping[str, bytes] | None = None
    ) -> Answer:
        """EngineError 400 when the prompt leaves no room in the context or places an image without bytes."""
        most = min(sampling.max_tokens, context - len(prompt.ids))
        if not prompt.ids or most < 1:
            raise EngineError(f"{len(prompt.ids)} prompt tokens do not fit a context of {context}", status=400)
        contents = images or {}
        missing = [image.sha256 for image in prompt.images if image.sha256 not in contents]
        if missing:
            raise EngineError(f"the bytes of image {missing[0][:12]} are not at hand", status=400)
        return cls(prompt, sampling, most, tuple(contents[image.sha256] for image in prompt.images))

    @property
    def left(self) -> int:
        """Tokens that may still be sampled."""
        return self.most - len(self.sampled)

    @property
    def rest(self) -> Sampling:
        """What to ask the next request for. It must not draw again the numbers that were drawn for the ids so far."""
        seed = self.sampling.seed
        return msgspec.structs.replace(
            self.sampling,
            max_tokens=self.left,
            seed=None if seed is None else (seed + len(self.sampled)) & MOST_SEED,
        )

    @property
    def ids(self) -> list[int]:
        """The prompt and what is sampled of the answer: where the next request begins."""
        return [*self.prompt.ids, *self.sampled]

    @property
    def collapsed(self) -> list[int]:
        """`ids` with one placeholder for each image, as servers take them that place the others themselves."""
        found: list[int] = []
        at = 0
        for image in self.prompt.images:
            found += self.prompt.ids[at : image.start + 1]
            at = image.start + image.count
        return [*found, *self.prompt.ids[at:], *self.sampled]

    def take(self, ids: Sequence[int]) -> None:
        """These were sampled. EngineError when they are more than was asked for."""
        if len(ids) > self.left:
            raise EngineError(f"a server sampled {len(ids)} tokens, {self.left} were asked for")
        self.sampled += ids
