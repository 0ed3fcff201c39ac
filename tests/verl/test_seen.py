"""Rows with images in veRL's terms, and a tiny model that sees scores them in veRL's batch as it does by itself."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from types import MethodType
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image as Pillow
from seeing import write_seeing_model

from openforgerl.errors import ExactnessError
from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.training.rows import Row, rows_of
from openforgerl.training.verl.seen import SeenImages
from openforgerl.types import Conversation, Image, Message, Role, Sample, Source, Span, Text

pytestmark = pytest.mark.verl


def png(width: int, height: int, red: int) -> bytes:
    buffer = io.BytesIO()
    image = Pillow.new("RGB", (width, height), (red, 0, 0))
    image.paste((0, 0, 200), (10, 10, 40, 30))
    image.save(buffer, "PNG")
    return buffer.getvalue()


BYTES = {hashlib.sha256(data).hexdigest(): data for data in (png(200, 120, 9), png(97, 333, 250))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("vl") / "model")


@pytest.fixture(scope="module")
def renderer(model: Path) -> ChatRenderer:
    return load_renderer(model)


@pytest.fixture(scope="module")
def network(model: Path) -> Any:
    from transformers import Qwen3VLForConditionalGeneration  # noqa: PLC0415  (slow to import)

    return Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor(model: Path, network: Any) -> Any:
    """What `verl.utils.hf_processor` makes, but of the class that does without torchvision."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (  # noqa: PLC0415
        Qwen2VLImageProcessorPil,
    )

    class Processor:
        def __init__(self) -> None:
            self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(model)
            self.config = network.config
            self.get_rope_index = MethodType(type(network.model).get_rope_index, self)
            self.get_vision_position_ids = MethodType(type(network.model).get_vision_position_ids, self)

    return Processor()


@pytest.fixture(scope="module")
def sample(renderer: ChatRenderer) -> Sample:
    """Two images in a prompt, and five sampled ids."""
    first, second = (Image(name, "image/png") for name in BYTES)
    conversation = Conversation(messages=(Message(role=Role.USER, parts=(first, Text("or"), second, Text("?"))),))
    prompt = renderer.render(conversation, restored={}, clock=0.0, kwargs={}, images=BYTES)
    ids = (*prompt.ids, 70, 71, 72, 73, 2)
    span = Span(start=len(prompt.ids), stop=len(ids), call_id="c", offset=0, state="trained")
    return Sample(
        sample_id="s", attempt_id="a", rollout_id="r", group_id="g", ids=ids, spans=(span,), logprobs=(-1.0,) * 5,
        source=Source.POLICY, images=prompt.images,
    )  # fmt: skip


def row_of(sample: Sample, renderer: ChatRenderer) -> Row:
    (row,) = rows_of([sample], version=0, seeing=renderer.placeholders)
    return row


def test_images_come_in_order_with_all_their_placeholders(
    sample: Sample, renderer: ChatRenderer, processor: Any
) -> None:
    assert renderer.placeholders is not None
    row = row_of(sample, renderer)
    inputs, positions = SeenImages(processor, renderer.placeholders.token_id).inputs(row, BYTES)
    grids = inputs["image_grid_thw"]
    assert [image.sha256 for image in row.images] == list(BYTES)
    # 120 x 200 pixels are 8 x 12 patches of 16, as multiples of 32; 333 x 97 are 20 x 6.
    assert grids.tolist() == [[1, 8, 12], [1, 20, 6]]
    pads = sum(id == renderer.placeholders.token_id for id in sample.ids)
    assert pads == int(grids.prod(1).sum()) // 2**2 == 54
    assert inputs["pixel_values"].shape == (8 * 12 + 20 * 6, 3 * 2 * 16 * 16)
    assert inputs["images_seqlens"].tolist() == [96, 120]
    assert positions.shape == (4, len(sample.ids)) and positions[0].tolist() == list(range(len(sample.ids)))
    at = row.images[0].start
    # Inside an image places are rows and columns of 2 x 2 patches: 4 rows of 6.
    height, width = positions[2, at : at + 24] - positions[2, at], positions[3, at : at + 24] - positions[3, at]
    assert height.tolist() == [place // 6 for place in range(24)]
    assert width.tolist() == [place % 6 for place in range(24)]


def test_the_model_scores_the_row_as_it_scores_the_conversation(
    sample: Sample, renderer: ChatRenderer, processor: Any, network: Any
) -> None:
    assert renderer.placeholders is not None
    by = SeenImages(processor, renderer.placeholders.token_id)
    row = row_of(sample, renderer)
    inputs, positions = by.inputs(row, BYTES)
    ids = torch.tensor([sample.ids])
    pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    with torch.no_grad():
        ours = network(input_ids=ids, position_ids=positions[:, None], **pixels).logits
        kinds = (ids == renderer.placeholders.token_id).int()
        own = network(input_ids=ids, mm_token_type_ids=kinds, **pixels).logits
        dark = {"pixel_values": torch.zeros_like(pixels["pixel_values"]), "image_grid_thw": pixels["image_grid_thw"]}
        blind = network(input_ids=ids, position_ids=positions[:, None], **dark).logits
    assert (ours - own).abs().max() < 1e-5
    assert (ours - blind).abs().max() > 1e-2, "what is seen matters"


def test_an_image_that_is_cut_otherwise_stops_training(sample: Sample, renderer: ChatRenderer, processor: Any) -> None:
    assert renderer.placeholders is not None
    other = dict.fromkeys(BYTES, png(64, 64, 3))
    with pytest.raises(ExactnessError, match=r"cuts image .* into \[1, 4, 4\]"):
        SeenImages(processor, renderer.placeholders.token_id).inputs(row_of(sample, renderer), other)


def test_text_has_places_of_the_same_shape(sample: Sample, renderer: ChatRenderer, processor: Any) -> None:
    assert renderer.placeholders is not None
    ids = (5, 6, 7, 8)
    span = Span(start=2, stop=4, call_id="c", offset=0, state="trained")
    text = msgspec.structs.replace(sample, ids=ids, spans=(span,), logprobs=(-1.0, -1.0), images=())
    inputs, positions = SeenImages(processor, renderer.placeholders.token_id).inputs(row_of(text, renderer), {})
    assert inputs == {} and positions.tolist() == [[0, 1, 2, 3]] * 4
