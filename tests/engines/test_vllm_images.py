"""A real vLLM server with a tiny Qwen3-VL: it reads our prompt id by id, and its log-probs are those of transformers.

By hand, with `-m slow`: write the model with `tests/verl/seeing.py`, serve it with `--enable-scale-out
--logprobs-mode processed_logprobs --dtype float32` where torchvision is installed, and name both.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from openforgerl.engines.opening import open_engine
from openforgerl.engines.options import EngineOptions
from openforgerl.engines.server_engine import ServerEngine
from openforgerl.rendering import load_renderer
from openforgerl.types import Conversation, Image, Message, Role, Sampling, Text

URL, MODEL = os.environ.get("OPENFORGERL_SEEING_VLLM", ""), os.environ.get("OPENFORGERL_SEEING_MODEL", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (URL and MODEL), reason="OPENFORGERL_SEEING_VLLM and OPENFORGERL_SEEING_MODEL name no server and no model"
    ),
]


def png(width: int, height: int, at: int) -> bytes:
    image = Pillow.new("RGB", (width, height), (240, 240, 240))
    image.paste((0, 0, 200), (at, 10, at + 60, 70))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


DATA = [png(200, 120, 20), png(97, 333, 30)]
BYTES = {hashlib.sha256(data).hexdigest(): data for data in DATA}


async def test_it_reads_the_prompt_that_is_recorded_and_scores_it_as_transformers_does() -> None:
    import torch  # noqa: PLC0415  (slow to import)
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration  # noqa: PLC0415

    renderer = load_renderer(Path(MODEL))
    assert renderer.placeholders is not None
    first, second = (Image(name, "image/png") for name in BYTES)
    message = Message(role=Role.USER, parts=(Text("Is"), first, second, Text("?")))
    prompt = renderer.render(Conversation(messages=(message,)), restored={}, clock=0.0, kwargs={}, images=BYTES)
    engine = await asyncio.to_thread(open_engine, f"vllm:{URL}", renderer, EngineOptions())
    assert isinstance(engine, ServerEngine)
    try:
        # A prompt that the server reads otherwise, or does not vouch for, would be refused here.
        sampling = Sampling(max_tokens=8, seed=3)
        chunks = [chunk async for chunk in engine.generate(prompt, sampling, affinity="s", images=BYTES)]
    finally:
        await engine.close()
    ids = [id for chunk in chunks for id in chunk.ids]
    said = torch.tensor([value for chunk in chunks for value in chunk.logprobs or ()])
    assert len(ids) == len(said) > 0
    network: Any = Qwen3VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32).eval()
    full = torch.tensor([[*prompt.ids, *ids]])

    def scored(data: list[bytes]) -> Any:
        shown = [Pillow.open(io.BytesIO(one)) for one in data]
        pixels = Qwen2VLImageProcessorPil.from_pretrained(MODEL)(images=shown, return_tensors="pt")
        kinds = (full == renderer.placeholders.token_id).int()  # type: ignore[union-attr]
        with torch.no_grad():
            logits = network(input_ids=full, mm_token_type_ids=kinds, **pixels).logits[0, len(prompt.ids) - 1 : -1]
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]

    difference = float((scored(DATA) - said).abs().max())
    other = float((scored([png(200, 120, 90), png(97, 333, 5)]) - said).abs().max())
    print(
        f"\n{len(prompt.ids)} prompt ids; {len(ids)} sampled; difference {difference:.2g}, of other images {other:.2g}"
    )
    assert difference < 2e-3 and other > 5 * difference
