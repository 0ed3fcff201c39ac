"""Images in every dialect over real HTTP, to a model that can see: prompt, record, bytes, echo, refusals."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from PIL import Image as Pillow

from openforgerl.engines.opening import open_engine
from openforgerl.engines.options import EngineOptions, RelayOptions
from openforgerl.errors import InputError
from openforgerl.proxy import prompting
from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.testing.fake_upstream import KEY, says, upstream
from openforgerl.testing.tiny_vl import write_tiny_vl
from openforgerl.types import CallStatus, Image, Role

from .house import ask, house, scripted
from .speakers import SPEAKERS, Speaker, Talker

EVERY = pytest.mark.parametrize("speaker", SPEAKERS, ids=lambda speaker: speaker.name)

LOOK = '<tool_call>\n{"name": "bash", "arguments": {"command":   "look red.png"}}\n</tool_call><|im_end|>'
Call = tuple[str, str, str]


def png(width: int, height: int, red: int = 255) -> bytes:
    buffer = io.BytesIO()
    Pillow.new("RGB", (width, height), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


RED, DARK, WIDE = png(64, 64), png(64, 64, 9), png(640, 480)
"""4, 4 and 234 placeholders (derived in tests/rendering/test_images.py)."""


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def spelled(data: bytes) -> str:
    return base64.b64encode(data).decode()


def chat_parts(text: str, data: bytes) -> list[Any]:
    url = f"data:image/png;base64,{spelled(data)}"
    return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]


def responses_parts(text: str, data: bytes) -> list[Any]:
    url = f"data:image/png;base64,{spelled(data)}"
    return [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": url, "detail": "high"}]


def messages_parts(text: str, data: bytes) -> list[Any]:
    source = {"type": "base64", "media_type": "image/png", "data": spelled(data)}
    return [{"type": "text", "text": text}, {"type": "image", "source": source}]


def gemini_parts(text: str, data: bytes) -> list[Any]:
    return [{"text": text}, {"inlineData": {"mimeType": "image/png", "data": spelled(data)}}]


def asking(speaker: Speaker, text: str, data: bytes) -> list[Any]:
    """A user turn of text and an image."""
    if speaker.name == "gemini":
        return [{"role": "user", "parts": gemini_parts(text, data)}]
    parts = {"chat": chat_parts, "responses": responses_parts, "messages": messages_parts}[speaker.name]
    return [{"role": "user", "content": parts(text, data)}]


def chat_seen(call: Call, text: str, data: bytes) -> list[Any]:
    return [{"role": "tool", "tool_call_id": call[0], "content": chat_parts(text, data)}]


def responses_seen(call: Call, text: str, data: bytes) -> list[Any]:
    return [{"type": "function_call_output", "call_id": call[0], "output": responses_parts(text, data)}]


def messages_seen(call: Call, text: str, data: bytes) -> list[Any]:
    block = {"type": "tool_result", "tool_use_id": call[0], "content": messages_parts(text, data)}
    return [{"role": "user", "content": [block]}]


def gemini_seen(call: Call, text: str, data: bytes) -> list[Any]:
    answer = {"functionResponse": {"id": call[0], "name": call[1], "response": {"output": text}}}
    return [{"role": "user", "parts": [answer, gemini_parts("", data)[1]]}]


SEEN: Mapping[str, Callable[[Call, str, bytes], list[Any]]] = MappingProxyType(
    {"chat": chat_seen, "responses": responses_seen, "messages": messages_seen, "gemini": gemini_seen}
)
"""A tool result of text and an image."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return load_renderer(write_tiny_vl(tmp_path_factory.mktemp("vl") / "tiny-vl"))


@EVERY
async def test_an_agent_looks_at_images(tmp_path: Path, seeing: ChatRenderer, speaker: Speaker) -> None:
    engine = scripted(
        seeing,
        {"match": r"Task.*image_pad", "raw": LOOK, "times": 1},
        {"match": r"seen:.*image_pad", "text": "It is dark."},
        {"text": "Bye."},
    )
    async with house(tmp_path, seeing, engine) as home:
        talker = await Talker.open(home, speaker)
        history = asking(speaker, "Task", WIDE)
        if speaker.count_path:
            counted = await talker.post(speaker.count_path, speaker.body(history, stream=False, tools=True))
        first = await talker.say(history, tools=True)
        (call,) = first.calls
        history += first.turn + SEEN[speaker.name](call, "seen:", DARK)
        second = await talker.say(history, tools=True, stream=True)
        assert second.text == "It is dark."
        history += second.turn + asking(speaker, "And this?", RED)
        assert (await talker.say(history, tools=True)).text == "Bye."
        one, two, three = await home.calls()
        samples = await home.control("GET", "/v1/sessions/s1/samples")
        page = await home.control("GET", "/v1/sessions/s1/calls")
        async with home.http_sessions() as sessions:
            kept = await sessions.images([sha(WIDE), sha(DARK), sha(RED)])
            with pytest.raises(InputError, match="is not in this run database"):
                await sessions.images([sha(b"another")])
    assert kept == {sha(WIDE): WIDE, sha(DARK): DARK, sha(RED): RED}
    assert [[image.sha256 for image in call.prompt.images] for call in (one, two, three)] == [
        [sha(WIDE)],
        [sha(WIDE), sha(DARK)],
        [sha(WIDE), sha(DARK), sha(RED)],
    ]
    assert [(image.count, image.grid) for image in three.prompt.images] == [
        (234, (1, 26, 36)),
        (4, (1, 4, 4)),
        (4, (1, 4, 4)),
    ]
    # The image belongs to the tool's result, and the sampled call was restored before it.
    (result,) = [message for message in two.conversation.messages if message.role is Role.TOOL]
    assert Image(sha(DARK), "image/png") in result.parts
    assert one.sampled_ids == seeing.encode(LOOK)
    known = one.prompt.ids + one.sampled_ids
    assert two.prompt.ids[: len(known)] == known
    placed = two.prompt.images[1]
    assert seeing.decode(two.prompt.ids[len(known) : placed.start]).endswith("seen:<|vision_start|>")
    assert seeing.decode(two.prompt.ids[placed.start + 4 :]).startswith("<|vision_end|>\n</tool_response>")
    assert two.prompt.images[0] == one.prompt.images[0]
    (pad,) = seeing.encode("<|image_pad|>")
    assert [call.prompt.ids.count(pad) for call in (one, two, three)] == [234, 238, 242]
    (row,) = samples.body["samples"]
    whole = [{"sha256": sha(WIDE), "start": three.prompt.images[0].start, "count": 234, "grid": [1, 26, 36]}]
    assert row["images"][:1] == page.body["calls"][0]["images"] == whole
    assert len(row["images"]) == 3
    assert [span["call_id"] for span in row["spans"]] == [one.call_id, two.call_id, three.call_id]
    assert samples.body["totals"]["trained"] == sum(len(call.sampled_ids) for call in (one, two, three))
    if speaker.count_path:
        assert speaker.counted(counted.body) == len(one.prompt.ids)


async def test_a_response_that_points_back_at_images(tmp_path: Path, seeing: ChatRenderer) -> None:
    """The images of the named answer do not come again; the store has them, also after a restart."""
    (speaker,) = [one for one in SPEAKERS if one.name == "responses"]
    answer = {"text": "Red.", "times": 0}
    async with house(tmp_path, seeing, scripted(seeing, answer)) as home:
        talker = await Talker.open(home, speaker)
        first = await talker.ask(asking(speaker, "See", RED))
        again = await talker.ask(speaker.user("Sure?"), previous_response_id=first.body["id"])
        assert again.status == 200, again.body
    fresh = load_renderer(write_tiny_vl(tmp_path / "tiny-vl"))  # has seen nothing yet
    async with house(tmp_path, fresh, scripted(fresh, answer)) as home:
        talker.http, talker.base = home.http, home.proxy.base_urls("s1")["responses"]
        later = await talker.ask(speaker.user("Sure?"), previous_response_id=first.body["id"])
        assert later.status == 200, later.body
        one, two, three = await home.calls()
    assert two.prompt.images == three.prompt.images == one.prompt.images
    assert two.prompt.ids == three.prompt.ids
    assert two.prompt.ids[: len(one.prompt.ids) + len(one.sampled_ids)] == one.prompt.ids + one.sampled_ids


@EVERY
async def test_images_that_cannot_be_read_are_a_clear_400(
    tmp_path: Path, seeing: ChatRenderer, speaker: Speaker
) -> None:
    async with house(tmp_path, seeing, scripted(seeing, {"text": "ok", "times": 0})) as home:
        talker = await Talker.open(home, speaker)
        for data, why in ((b"no image", "is none of PNG"), (WIDE[:-300], "cannot be decoded")):
            reply = await talker.ask(asking(speaker, "See", data))
            assert reply.status == 400
            message = reply.body["error"]["message"]
            assert "messages[0] holds an image that " + why in message
        assert await home.calls() == []
        assert (await talker.say(asking(speaker, "See", RED))).text == "ok"
        (call,) = await home.calls()
    assert call.status is CallStatus.COMPLETE


async def test_too_many_and_too_large(tmp_path: Path, seeing: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompting, "MOST_IMAGES", 3)
    monkeypatch.setattr(prompting, "MOST_IMAGE_BYTES", len(WIDE) - 1)
    image = chat_parts("", RED)[1]
    async with house(tmp_path, seeing, scripted(seeing, {"text": "ok", "times": 0})) as home:
        client = await home.client()
        few = await client.post(ask(messages=[{"role": "user", "content": [image] * 3}]))
        many = await client.post(ask(messages=[{"role": "user", "content": [image] * 4}]))
        large = await client.post(ask(messages=[{"role": "user", "content": chat_parts("", WIDE)}]))
    assert few.status == 200
    assert (many.status, large.status) == (400, 400)
    assert many.body["error"]["message"] == "messages hold 4 images; at most 3 are taken"
    assert large.body["error"]["message"].startswith(f"messages hold an image of {len(WIDE)} bytes; at most")


async def test_a_text_model_names_itself(tmp_path: Path, renderer: ChatRenderer, model_dir: Path) -> None:
    async with house(tmp_path, renderer, scripted(renderer, {"text": "ok"})) as home:
        client = await home.client()
        reply = await client.post(ask(messages=[{"role": "user", "content": chat_parts("See", RED)}]))
    assert reply.status == 400
    assert reply.body["error"]["code"] == "template_error"
    said = f"messages[0] holds an image; this model takes no images ({model_dir.name}), send text only"
    assert reply.body["error"]["message"] == f"messages: {said}"


async def test_an_edited_image_is_another_conversation(tmp_path: Path, seeing: ChatRenderer) -> None:
    """The prompt's ids are the same for both images, and the answer to one is not restored after the other."""
    async with house(tmp_path, seeing, scripted(seeing, {"raw": LOOK, "times": 0})) as home:
        client = await home.client()
        turns = [{"role": "user", "content": chat_parts("See", RED)}]
        message = await client.message(ask(messages=turns))
        turns[0] = {"role": "user", "content": chat_parts("See", DARK)}
        await client.message(ask(messages=[*turns, message, {"role": "user", "content": "Well?"}]))
        one, two = await home.calls()
    assert two.prompt.ids[: len(one.prompt.ids)] == one.prompt.ids
    assert two.prompt.images[0].sha256 == sha(DARK)
    assert two.parent_call_id is None
    assert not any(span.kind == "call" for span in two.prompt.origins)


async def test_a_relayed_answer_about_an_image_is_encoded(
    tmp_path: Path, seeing: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher looked; the student's own template and image processor say what the prompt was."""
    monkeypatch.setenv("TEACHER_KEY", KEY)
    parts = chat_parts("See", RED)
    options = EngineOptions(relay=RelayOptions(model="teacher-1", key_env="TEACHER_KEY"), model_name="teacher")
    async with upstream(says("A red square.")) as fake:
        teacher = open_engine(f"relay:openai:{fake.url}", seeing, options)
        async with house(tmp_path, seeing, teacher) as home:
            client = await home.client()
            message = await client.message(ask(messages=[{"role": "user", "content": parts}]))
            (call,) = await home.calls()
        await teacher.close()
    assert message["content"] == "A red square."
    assert fake.bodies[0]["messages"][0]["content"][1] == parts[1]
    assert [(image.sha256, image.count) for image in call.prompt.images] == [(sha(RED), 4)]
    assert seeing.decode(call.sampled_ids) == "A red square.<|im_end|>"
