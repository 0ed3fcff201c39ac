"""Rows with images for foreign trainers: every placeholder has its image, or the row is not given away."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from PIL import Image as Pillow

from openforgerl.errors import EngineError, ExactnessError, InputError
from openforgerl.rendering.images import ImageRules, Placeholders
from openforgerl.training.borrowed import BorrowedEngine
from openforgerl.training.rows import rows_of
from openforgerl.types import PlacedImage, Prompt, Sample, Sampling

MakeSample = Callable[..., Sample]
PAD = 50
SEEING = Placeholders(ImageRules(patch_size=16, merge_size=2), PAD)


def placed(
    start: int, grid: tuple[int, int, int] = (1, 2, 4), name: str = "a", count: int | None = None
) -> PlacedImage:
    """2 x 4 patches are 1 x 2 placeholders."""
    return PlacedImage(sha256=name * 64, start=start, count=count or 2, grid=grid)


def shown(make_sample: MakeSample, ids: list[int], *images: PlacedImage) -> Sample:
    sample = make_sample("s", ids, [(7, 9)], logprobs=[-1, -2])
    return msgspec.structs.replace(sample, images=images)


IDS = [1, PAD, PAD, 2, PAD, PAD, 3, 8, 9]


def test_images_go_along_in_order_of_appearance(make_sample: MakeSample) -> None:
    images = (placed(1), placed(4, name="b"))
    (row,) = rows_of([shown(make_sample, IDS, *images)], version=0, seeing=SEEING)
    assert row.images == images and row.prompt_ids + row.response_ids == tuple(IDS)


@pytest.mark.parametrize(
    "images",
    [
        (placed(1),),  # nothing is behind the second run
        (placed(4), placed(1)),  # the other order
        (placed(1), placed(3)),  # not where it is said to be
        (placed(1), placed(4, grid=(1, 4, 4))),  # 4 placeholders are needed
        (placed(1), placed(4, count=1)),  # one is missing
        (placed(1), placed(1)),  # twice the same place
    ],
)
def test_placeholders_that_do_not_fit_their_images_are_our_fault(
    images: tuple[PlacedImage, ...], make_sample: MakeSample
) -> None:
    with pytest.raises(ExactnessError, match="sample s"):
        rows_of([shown(make_sample, IDS, *images)], version=0, seeing=SEEING)
    with pytest.raises(InputError, match="sees none"):
        rows_of([shown(make_sample, IDS, *images)], version=0)


def test_a_placeholder_that_the_model_sampled_itself_ends_no_training(make_sample: MakeSample) -> None:
    """No trainer can score it, and any model may say it: the row is left out, the rollout keeps its place."""
    good = shown(make_sample, IDS, placed(1), placed(4))
    said = msgspec.structs.replace(shown(make_sample, [*IDS[:7], PAD, 9], placed(1), placed(4)), sample_id="said")
    assert [row.sample_id for row in rows_of([good, said], version=0, seeing=SEEING)] == ["s"]
    (row,) = rows_of([said], version=3, seeing=SEEING)
    assert (row.response_mask, row.versions, row.images) == ((0,), (3, 3), ())
    assert PAD not in row.prompt_ids + row.response_ids


def png(width: int, height: int, turned: bool = False) -> bytes:
    buffer = io.BytesIO()
    image = Pillow.new("RGBA", (width, height), (9, 0, 0, 255))
    exif = image.getexif()
    if turned:
        exif[0x0112] = 6  # lies on its side
    image.save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


@dataclass
class Servers:
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    async def generate(self, request_id: str, **asked: Any) -> Any:
        self.asked.append({"request_id": request_id, **asked})
        cut = len(self.asked) == 1

        @dataclass
        class Answer:
            token_ids: list[int]
            log_probs: list[float]
            stop_reason: str
            extra_fields: dict[str, Any]

        return Answer([5] if cut else [2], [-1.0], "aborted" if cut else "completed", {})


async def test_a_trainers_servers_are_shown_images_upright_and_again_when_an_answer_goes_on() -> None:
    data = [png(64, 32), png(64, 32, turned=True)]
    names = [hashlib.sha256(one).hexdigest() for one in data]
    images = tuple(
        PlacedImage(sha256=name, start=at, count=2, grid=(1, 2, 4)) for name, at in zip(names, (1, 4), strict=True)
    )
    prompt = Prompt(ids=tuple(IDS), images=images)
    servers = Servers()
    engine = BorrowedEngine(servers.generate, context_length=100, stop_ids=(2,), retry_seconds=0.001)
    contents = dict(zip(names, data, strict=True))
    answer = engine.generate(prompt, Sampling(max_tokens=9), affinity="s", images=contents)
    assert [id async for chunk in answer for id in chunk.ids] == [5, 2]
    assert [asked["prompt_ids"] for asked in servers.asked] == [IDS, [*IDS, 5]]
    for asked in servers.asked:
        assert [(one.size, one.mode) for one in asked["image_data"]] == [((64, 32), "RGB"), ((32, 64), "RGB")]
    with pytest.raises(EngineError, match="not at hand"):
        [chunk async for chunk in engine.generate(prompt, Sampling(), affinity="s")]
