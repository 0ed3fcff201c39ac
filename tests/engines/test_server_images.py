"""Prompts with images to vLLM and SGLang servers: one placeholder goes, and the server says what it made of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from PIL import Image as Pillow

from openforgerl.engines.continuing import Answer
from openforgerl.engines.opening import open_engine
from openforgerl.engines.options import EngineOptions, ServersOptions
from openforgerl.engines.server_engine import ServerEngine
from openforgerl.errors import EngineError
from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.testing.fake_server import FakeServer, Flavour, continuation, logprob, serving
from openforgerl.testing.tiny_vl import write_tiny_vl
from openforgerl.types import Chunk, Conversation, FinishReason, Image, Message, Prompt, Role, Sampling, Text

FLAVOURS: tuple[Flavour, ...] = ("vllm", "sglang", "sglang-incremental")
QUICK = ServersOptions(connect_s=1.0, retry_seconds=0.05, patience_s=0.4, silence_s=5.0)


def png(red: int) -> bytes:
    """64 x 64 pixels: 4 placeholders (derived in tests/rendering/test_images.py)."""
    buffer = io.BytesIO()
    Pillow.new("RGB", (64, 64), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


DARK, RED = png(9), png(255)
BYTES = {hashlib.sha256(data).hexdigest(): data for data in (DARK, RED)}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return load_renderer(write_tiny_vl(tmp_path_factory.mktemp("vl") / "tiny-vl"))


@pytest.fixture(scope="module")
def pad(seeing: ChatRenderer) -> int:
    assert seeing.placeholders is not None
    return seeing.placeholders.token_id


@pytest.fixture(scope="module")
def prompt(seeing: ChatRenderer) -> Prompt:
    """Dark, then red, with words around them."""
    dark, red = (Image(name, "image/png") for name in BYTES)
    parts = (Text("Is"), dark, Text("darker than"), red, Text("?"))
    conversation = Conversation(messages=(Message(role=Role.USER, parts=parts),))
    made = seeing.render(conversation, restored={}, clock=0.0, kwargs={}, images=BYTES)
    assert [image.count for image in made.images] == [4, 4]
    return made


@contextlib.asynccontextmanager
async def engine(seeing: ChatRenderer, *servers: FakeServer) -> AsyncIterator[ServerEngine]:
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(serving(server))
        spec = servers[0].flavour.partition("-")[0] + ":" + ",".join(server.url for server in servers)
        opened = await asyncio.to_thread(open_engine, spec, seeing, EngineOptions(servers=QUICK))
        assert isinstance(opened, ServerEngine)
        stack.push_async_callback(opened.close)
        for server in servers:
            server.bodies.clear()  # the probe's
        yield opened


async def collect(opened: ServerEngine, prompt: Prompt, most: int = 5) -> list[Chunk]:
    answer = opened.generate(prompt, Sampling(max_tokens=most, seed=5), affinity="s", images=BYTES)
    return [chunk async for chunk in answer]


def images_in(body: dict[str, Any]) -> list[bytes]:
    urls = body.get("image_data") or [part["url"] for part in body["content_parts"]]
    return [base64.b64decode(url.partition(";base64,")[2]) for url in urls]


def test_one_placeholder_stands_for_an_image(prompt: Prompt, pad: int) -> None:
    asked = Answer.begin(prompt, Sampling(max_tokens=9, seed=3), context=10_000, images=BYTES)
    assert asked.images == (DARK, RED)
    at, then = (image.start for image in prompt.images)
    # What is not a placeholder of these images stays where it was, sampled ids too, whatever they are.
    asked.take([pad, 7])
    ids = prompt.ids
    assert asked.collapsed == [*ids[:at], pad, *ids[at + 4 : then], pad, *ids[then + 4 :], pad, 7]
    assert asked.ids == [*ids, pad, 7]
    assert (asked.rest.max_tokens, asked.rest.seed, asked.left) == (7, 5, 7)
    with pytest.raises(EngineError, match="sampled 8 tokens, 7 were asked for"):
        asked.take([1] * 8)


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_images_go_beside_ids(flavour: Flavour, seeing: ChatRenderer, prompt: Prompt, pad: int) -> None:
    server = FakeServer(flavour=flavour, pad=pad, context=4096)
    async with engine(seeing, server) as opened:
        chunks = await collect(opened, prompt)
    ids = [id for chunk in chunks for id in chunk.ids]
    # The answer is to the prompt with every placeholder, as recorded and trained.
    assert ids == continuation(prompt.ids, 5) and chunks[-1].finish is FinishReason.LENGTH
    expected = [logprob([*prompt.ids, *ids[:at]], id) for at, id in enumerate(ids)]
    assert [value for chunk in chunks for value in chunk.logprobs or ()] == pytest.approx(expected, abs=1e-12)
    (body,) = server.bodies
    assert images_in(body) == [DARK, RED]
    params = body["sampling_params"]
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "ignore_eos": True}
    assert {name: params[name] for name in given} == given


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_replica_that_dies_under_an_image_loses_nothing(
    flavour: Flavour, seeing: ChatRenderer, prompt: Prompt, pad: int
) -> None:
    servers = [FakeServer(flavour=flavour, pad=pad, context=4096) for _ in range(2)]
    async with engine(seeing, *servers) as opened:
        await collect(opened, prompt, 1)
        own = next(server for server in servers if server.bodies)
        other = next(server for server in servers if not server.bodies)
        own.dies_after = 2
        chunks = await collect(opened, prompt)
    assert [id for chunk in chunks for id in chunk.ids] == continuation(prompt.ids, 5)
    (continued,) = other.bodies
    assert images_in(continued) == [DARK, RED]


def shorter(ids: list[int]) -> list[int]:
    return ids[:-1]


def other_text(ids: list[int]) -> list[int]:
    return [ids[0] + 1, *ids[1:]]


def nothing(ids: list[int]) -> None:
    del ids


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(
    ("reads", "said"),
    [(shorter, "they end elsewhere"), (other_text, "they differ from place 0 on"), (nothing, "does not say how")],
)
async def test_a_prompt_that_a_server_reads_otherwise_is_never_trained(
    flavour: Flavour,
    reads: Callable[[list[int]], list[int] | None],
    said: str,
    seeing: ChatRenderer,
    prompt: Prompt,
    pad: int,
) -> None:
    server = FakeServer(flavour=flavour, pad=pad, context=4096)
    async with engine(seeing, server) as opened:
        server.reads = reads
        with pytest.raises(EngineError, match=said) as refused:
            await collect(opened, prompt)
    assert refused.value.status == 400


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_what_a_server_lacks_for_images_is_said_at_the_start_and_text_still_goes(
    flavour: Flavour, seeing: ChatRenderer, prompt: Prompt, pad: int, caplog: pytest.LogCaptureFixture
) -> None:
    fix = "--enable-scale-out" if flavour == "vllm" else "SGLANG_MM_AVOID_RETOKENIZE"
    lacking = FakeServer(flavour=flavour, context=4096)
    if flavour != "vllm":
        lacking.pad, lacking.reads = pad, other_text
    async with engine(seeing, lacking) as opened:
        assert fix in caplog.text and "takes no images" in caplog.text
        with pytest.raises(EngineError, match="takes no images here") as refused:
            await collect(opened, prompt)
        assert fix in str(refused.value) and refused.value.status == 400
        text = Prompt(ids=(1, 1))
        chunks = await collect(opened, text)
        assert [id for chunk in chunks for id in chunk.ids] == continuation(text.ids, 5)


async def test_an_image_without_its_bytes_is_refused(seeing: ChatRenderer, prompt: Prompt, pad: int) -> None:
    async with engine(seeing, FakeServer(pad=pad, context=4096)) as opened:
        with pytest.raises(EngineError, match="are not at hand"):
            [chunk async for chunk in opened.generate(prompt, Sampling(), affinity="s")]
