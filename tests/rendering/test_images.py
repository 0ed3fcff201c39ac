"""Images as placeholder ids: how many, where, whose; what is refused; what restoring makes of them."""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from openforgerl.errors import InputError, TemplateError
from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.rendering.images import MOST_PIXELS, ImageRules, size_of
from openforgerl.testing.tiny_vl import MAX_PIXELS, MIN_PIXELS, write_tiny_vl
from openforgerl.types import (
    CallStatus,
    CallTiming,
    Conversation,
    FinishReason,
    Image,
    Message,
    ModelCall,
    Part,
    Prompt,
    Role,
    Text,
    ThreadRole,
    ToolCall,
    ToolSpec,
)

TINY = ImageRules(patch_size=16, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
QWEN2 = ImageRules()
QWEN3 = ImageRules(patch_size=16, min_pixels=65_536, max_pixels=16_777_216)
TOOLS = (ToolSpec(name="look", description="Look", parameters={"type": "object"}),)


def encoded(width: int, height: int, *, form: str = "PNG", red: int = 0, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Pillow.new("RGB", (width, height), (red, 0, 0)).save(buffer, form, **options)
    return buffer.getvalue()


WIDE, SMALL, OTHER = encoded(640, 480), encoded(64, 64), encoded(64, 64, red=9)
BYTES = {hashlib.sha256(data).hexdigest(): data for data in (WIDE, SMALL, OTHER)}


def image(data: bytes) -> Image:
    return Image(hashlib.sha256(data).hexdigest(), "image/png")


def user(*parts: Part) -> Message:
    return Message(role=Role.USER, parts=parts)


def calls_look(number: int) -> Message:
    return Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id=f"c{number}", name="look", arguments="{}"),))


def result(number: int, *parts: Part) -> Message:
    return Message(role=Role.TOOL, parts=parts, tool_call_id=f"c{number}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vl(tmp_path_factory.mktemp("vl") / "tiny-vl")


@pytest.fixture(scope="module")
def renderer(directory: Path) -> ChatRenderer:
    return load_renderer(directory)


def rendered(
    renderer: ChatRenderer,
    *messages: Message,
    restored: Mapping[int, ModelCall] | None = None,
    contents: Mapping[str, bytes] = BYTES,
) -> Prompt:
    asked = Conversation(messages=messages, tools=TOOLS)
    return renderer.render(asked, restored=restored or {}, clock=0.0, kwargs={}, images=contents)


def pad(renderer: ChatRenderer) -> int:
    (token_id,) = renderer.encode("<|image_pad|>")
    return token_id


def shown(renderer: ChatRenderer, prompt: Prompt) -> str:
    """The prompt's text, every image as `[w x h]` in placeholders."""
    text, at = "", 0
    for placed in prompt.images:
        _, rows, columns = placed.grid
        text += renderer.decode(prompt.ids[at : placed.start]) + f"[{columns // 2} x {rows // 2}]"
        at = placed.start + placed.count
    return text + renderer.decode(prompt.ids[at:])


@pytest.mark.parametrize(
    ("rules", "width", "height", "grid"),
    [
        # 20 x 15 units of 32 are 307,200 pixels, too many: /sqrt(307200/262144) = 18.48 x 13.86, rounded down.
        (TINY, 640, 480, (1, 26, 36)),
        (TINY, 64, 64, (1, 4, 4)),
        # Rounds to no unit at all: 64 times as large, 2 x 2 units.
        (TINY, 1, 1, (1, 4, 4)),
        # 2.5 and 1.5 units: halves go to the even number, 2 and 2.
        (TINY, 80, 48, (1, 4, 4)),
        # *sqrt(4096/200) = 905.1 x 4.53 pixels, rounded up to 29 x 1 units. 200 : 1 is the thinnest that is taken.
        (TINY, 200, 1, (1, 2, 58)),
        # 40 x 22.5 units; the half goes to 22.
        (QWEN3, 1280, 720, (1, 44, 80)),
        # 36 x 36 units of 28 are 1,016,064 pixels, more than 1,003,520: 35.78, rounded down.
        (QWEN2, 1000, 1000, (1, 70, 70)),
    ],
)
def test_the_grid(rules: ImageRules, width: int, height: int, grid: tuple[int, int, int]) -> None:
    assert rules.grid(width, height) == grid
    assert rules.count(grid) == grid[1] * grid[2] // 4


def test_the_grid_is_transformers_grid(directory: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (  # noqa: PLC0415  # slow to import
        Qwen2VLImageProcessorPil,
        smart_resize,
    )

    draw = random.Random(0)
    for rules in (TINY, QWEN2, QWEN3):
        unit = rules.patch_size * rules.merge_size
        for _ in range(400):
            width, height = (int(2 ** draw.uniform(0, 12)) for _ in range(2))
            if max(width, height) > 200 * min(width, height):
                continue
            rows, columns = smart_resize(height, width, unit, rules.min_pixels, rules.max_pixels)
            grid = (1, rows // rules.patch_size, columns // rules.patch_size)
            assert rules.grid(width, height) == grid, (rules, width, height)
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    for data in (WIDE, SMALL, encoded(33, 200)):
        with Pillow.open(io.BytesIO(data)) as opened:
            theirs = processor(images=[opened], return_tensors="np")["image_grid_thw"].tolist()
        assert [list(TINY.grid(*size_of(data)))] == theirs


def test_ids_are_transformers_ids_with_expanded_placeholders(directory: Path, renderer: ChatRenderer) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415  # slow to import

    reference = AutoTokenizer.from_pretrained(directory)
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "text", "text": "?"}],
        },
        {"role": "assistant", "content": "A box."},
        {"role": "user", "content": [{"type": "image"}]},
    ]
    text = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    for count in (18 * 13, 4):
        text = text.replace("<|image_pad|>", "<pad>" * count, 1)
    expected = reference(text.replace("<pad>", "<|image_pad|>"), add_special_tokens=False)["input_ids"]
    asked = Conversation(
        messages=(
            user(Text("See "), image(WIDE), Text("?")),
            Message(role=Role.ASSISTANT, parts=(Text("A box."),)),
            user(image(SMALL)),
        )
    )
    prompt = renderer.render(asked, restored={}, clock=0.0, kwargs={}, images=BYTES)
    assert prompt.ids == tuple(expected)


def test_where_images_stand_and_whose_the_ids_are(renderer: ChatRenderer) -> None:
    prompt = rendered(renderer, user(Text("See"), image(WIDE), image(SMALL), Text("!")))
    ours = pad(renderer)
    first, second = prompt.images
    assert [(one.sha256, one.count, one.grid) for one in prompt.images] == [
        (image(WIDE).sha256, 234, (1, 26, 36)),
        (image(SMALL).sha256, 4, (1, 4, 4)),
    ]
    assert [at for at, token in enumerate(prompt.ids) if token == ours] == [
        *range(first.start, first.start + 234),
        *range(second.start, second.start + 4),
    ]
    said = [(span.kind, span.message, renderer.decode(prompt.ids[span.start : span.stop])) for span in prompt.origins]
    assert said[-8:-1] == [
        ("data", 0, "See"),
        ("template", None, "<|vision_start|>"),
        ("data", 0, "<|image_pad|>" * 234),
        ("template", None, "<|vision_end|><|vision_start|>"),
        ("data", 0, "<|image_pad|>" * 4),
        ("template", None, "<|vision_end|>"),
        ("data", 0, "!"),
    ]


def test_text_alone_is_rendered_as_without_vision(renderer: ChatRenderer, model_of: Callable[[str], Any]) -> None:
    prompt = rendered(renderer, user(Text("Hi")))
    assert prompt.images == ()
    with pytest.raises(TemplateError, match=r"messages\[1\] holds an image; this model takes no images \(tiny\)"):
        rendered(model_of("tiny").renderer, user(Text("Hi")), user(image(SMALL)))


@pytest.mark.parametrize("spelled", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|image_"])
def test_data_is_never_a_placeholder(renderer: ChatRenderer, spelled: str) -> None:
    text = Text(spelled)
    prompt = rendered(
        renderer,
        Message(role=Role.SYSTEM, parts=(text,)),
        user(text, image(SMALL), text),
        calls_look(0),
        result(0, text, image(OTHER), text),
    )
    ours = pad(renderer)
    assert prompt.ids.count(ours) == 8
    assert all(set(prompt.ids[one.start : one.start + one.count]) == {ours} for one in prompt.images)
    assert prompt.ids.count(renderer.encode("<|vision_start|>")[0]) == 2
    assert shown(renderer, prompt).count(spelled + "<|vision_start|>[2 x 2]<|vision_end|>" + spelled) == 2


PARTS = st.lists(
    st.sampled_from(["<|image_pad|>", "<|vision_end|>", "<|im_end|>", "<|image_", "pad|>", "hi", "\n", "é"]).map(Text)
    | st.sampled_from([image(SMALL), image(OTHER), image(WIDE)]),
    max_size=5,
).map(tuple)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=PARTS, seen=PARTS, later=PARTS)
def test_any_mixture(
    renderer: ChatRenderer, asked: tuple[Part, ...], seen: tuple[Part, ...], later: tuple[Part, ...]
) -> None:
    messages = (user(*asked), calls_look(0), result(0, *seen), user(*later))
    prompt = rendered(renderer, *messages)
    named = [part.sha256 for message in messages for part in message.parts if isinstance(part, Image)]
    assert [placed.sha256 for placed in prompt.images] == named
    owned = [at for placed in prompt.images for at in range(placed.start, placed.start + placed.count)]
    ours = pad(renderer)
    assert [at for at, token in enumerate(prompt.ids) if token == ours] == owned
    # Without its images the prompt says the texts, each where it was.
    texts = [part.text for message in messages for part in message.parts if isinstance(part, Text)]
    said, at = shown(renderer, prompt), 0
    for text in texts:
        assert text in said[at:]
        at = said.index(text, at) + len(text)


def test_an_image_in_a_tool_result(renderer: ChatRenderer) -> None:
    prompt = rendered(renderer, user(Text("Go")), calls_look(0), result(0, Text("Seen: "), image(WIDE)))
    assert "<tool_response>\nSeen: <|vision_start|>[18 x 13]<|vision_end|>\n</tool_response>" in shown(renderer, prompt)


def without_result_images(directory: Path, target: Path, otherwise: str) -> ChatRenderer:
    """The model with a template that takes only text in tool results, and does `otherwise` with images there."""
    shutil.copytree(directory, target)
    template = (target / "chat_template.jinja").read_text("utf-8")
    place = template.rindex("{{- text_of(message.content) -}}")
    loop = "{%- for p in message.content -%}{%- if p.type == 'text' -%}{{- p.text -}}{%- else -%}" + otherwise
    string = "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    changed = string + loop + "{%- endif -%}{%- endfor -%}{%- endif -%}"
    rest = template[place:].removeprefix("{{- text_of(message.content) -}}")
    (target / "chat_template.jinja").write_text(template[:place] + changed + rest, "utf-8")
    return load_renderer(target)


@pytest.mark.parametrize("otherwise", ["", "{{- raise_exception('text only') -}}"], ids=["drops", "raises"])
def test_a_template_without_a_place_in_results_gets_the_image_behind_them(
    directory: Path, tmp_path: Path, otherwise: str
) -> None:
    moving = without_result_images(directory, tmp_path / "moving", otherwise)
    prompt = rendered(
        moving,
        user(Text("Go")),
        calls_look(0),
        result(0, Text("one"), image(WIDE)),
        result(1, image(SMALL), Text("two")),
        user(Text("Well?")),
    )
    assert (
        "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<|vision_start|>[18 x 13]<|vision_end|><|vision_start|>[2 x 2]<|vision_end|><|im_end|>\n"
        "<|im_start|>user\nWell?<|im_end|>\n"
    ) in shown(moving, prompt)
    # The placeholders are still the results' own.
    data = {span.start: span.message for span in prompt.origins if span.kind == "data"}
    assert [data[placed.start] for placed in prompt.images] == [2, 3]
    last = rendered(moving, user(Text("Go")), calls_look(0), result(0, image(SMALL)))
    assert shown(moving, last).endswith("[2 x 2]<|vision_end|><|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_leaves_an_image_out_is_refused(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "lossy"
    shutil.copytree(directory, target)
    template = (target / "chat_template.jinja").read_text("utf-8")
    assert "<|image_pad|>" in template
    (target / "chat_template.jinja").write_text(template.replace("<|image_pad|>", ""), "utf-8")
    with pytest.raises(TemplateError, match="wrote 0 places for 1 images"):
        rendered(load_renderer(target), user(image(SMALL)))


def recorded(
    renderer: ChatRenderer, messages: tuple[Message, ...], prompt: Prompt, raw: str
) -> tuple[Message, ModelCall]:
    """The turn that `raw` is, and the call that sampled it."""
    conversation = Conversation(messages=messages, tools=TOOLS)
    ids = renderer.encode(raw)
    parser = renderer.parser(conversation, prompt, seed="c")
    parser.feed(ids)
    _, answer = parser.finish()
    call = ModelCall(
        call_id="c",
        session_id="s",
        index=0,
        dialect="chat",
        thread="main",
        role=ThreadRole.MAIN,
        role_evidence="",
        parent_call_id=None,
        status=CallStatus.COMPLETE,
        conversation=conversation,
        prompt=prompt,
        sampled_ids=ids,
        weights_version=0,
        finish_reason=FinishReason.STOP,
        answer=answer,
        timing=CallTiming(received=0.0),
    )
    return answer, call


ODD = '<tool_call>\n{"name":   "look", "arguments": {}}\n</tool_call><|im_end|>'
"""Spaced as no template writes it."""


def test_images_do_not_disturb_restoring(renderer: ChatRenderer) -> None:
    first = (user(Text("See"), image(WIDE)),)
    prompt = rendered(renderer, *first)
    answer, call = recorded(renderer, first, prompt, ODD)
    second = (*first, answer, Message(role=Role.TOOL, parts=(image(SMALL),), tool_call_id="x"))
    following = rendered(renderer, *second, restored={1: call}, contents={image(SMALL).sha256: SMALL})
    known = prompt.ids + call.sampled_ids
    assert following.ids[: len(known)] == known
    assert following.images[0] == prompt.images[0]
    assert following.images[1].start > len(known)
    assert [(span.start, span.stop) for span in following.origins if span.kind == "call"] == [
        (len(prompt.ids), len(known))
    ]


def test_another_image_of_the_same_size_is_another_context(renderer: ChatRenderer) -> None:
    first = (user(image(SMALL)),)
    prompt = rendered(renderer, *first)
    answer, call = recorded(renderer, first, prompt, ODD)
    changed = (user(image(OTHER)), answer, result(0, Text("x")))
    restored = rendered(renderer, *first, answer, result(0, Text("x")), restored={1: call})
    assert any(span.kind == "call" for span in restored.origins)
    other = rendered(renderer, *changed, restored={1: call})
    assert other.ids[: len(prompt.ids)] == prompt.ids  # the ids cannot tell the images apart
    assert not any(span.kind == "call" for span in other.origins)


def test_a_sampled_placeholder_is_not_restored(renderer: ChatRenderer) -> None:
    """There is no image behind it; restored, it would be one placeholder too many for any engine."""
    first = (user(image(SMALL)),)
    prompt = rendered(renderer, *first)
    for raw, wanted in (("A picture<|im_end|>", 4), ("A <|image_pad|> picture<|im_end|>", 4)):
        answer, call = recorded(renderer, first, prompt, raw)
        following = rendered(renderer, *first, answer, user(Text("Well?")), restored={1: call})
        assert following.ids.count(pad(renderer)) == wanted
        assert any(span.kind == "call" for span in following.origins) == ("pad" not in raw)
        assert renderer.decode(following.ids).endswith("Well?<|im_end|>\n<|im_start|>assistant\n")


def claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims a size; no pixel follows."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"no image at all", "is none of PNG, JPEG, GIF, WEBP"),
        (encoded(64, 64, form="BMP"), "is none of"),
        (encoded(300, 300, form="JPEG")[:-400], "cannot be decoded"),
        (WIDE[: len(WIDE) // 2], "cannot be decoded"),
        (claiming(64, 64), "cannot be decoded"),
        (claiming(8000, 8000), f"is 8000x8000; at most {MOST_PIXELS} pixels"),
        (claiming(10_000, 10_000), "pixels"),  # Pillow warns
        (claiming(100_000, 100_000), "has too many pixels"),  # Pillow refuses
        (encoded(402, 2), "is 402x2; one side may be at most 200 times the other"),
    ],
)
def test_images_that_are_refused(renderer: ChatRenderer, data: bytes, why: str) -> None:
    with pytest.raises(TemplateError, match=r"messages\[1\] holds an image that") as refused:
        rendered(renderer, user(Text("Hi")), user(image(data)), contents={image(data).sha256: data})
    assert why in str(refused.value)


def test_an_image_without_its_bytes(directory: Path) -> None:
    fresh = load_renderer(directory)
    with pytest.raises(TemplateError, match=r"messages\[0\] holds an image that was not given with its bytes"):
        rendered(fresh, user(image(SMALL)), contents={})
    rendered(fresh, user(image(SMALL)))
    rendered(fresh, user(image(SMALL)), contents={})  # its size is known now


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP"])
def test_sizes(form: str) -> None:
    assert size_of(encoded(96, 64, form=form)) == (96, 64)


def test_an_image_lies_as_its_exif_data_says() -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert size_of(encoded(96, 64, form="JPEG", exif=exif)) == (64, 96)


def changed(directory: Path, target: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(directory, target)
    config = json.loads((target / name).read_text("utf-8"))
    change(config)
    (target / name).write_text(json.dumps(config), "utf-8")
    return target


def test_the_rules_are_part_of_the_digest(directory: Path, tmp_path: Path, renderer: ChatRenderer) -> None:
    other = changed(directory, tmp_path / "m", "preprocessor_config.json", lambda c: c.update(max_pixels=128 * 128))
    smaller = load_renderer(other)
    assert smaller.digest != renderer.digest
    assert rendered(smaller, user(image(WIDE))).images[0].count == 4 * 3  # 128 x 128 / (640 : 480), in units of 32
    assert load_renderer(directory).digest == renderer.digest


def test_the_configuration_of_transformers_5(directory: Path, tmp_path: Path, renderer: ChatRenderer) -> None:
    target = tmp_path / "five"
    shutil.copytree(directory, target)
    inner = json.loads((target / "preprocessor_config.json").read_text("utf-8"))
    (target / "preprocessor_config.json").unlink()
    (target / "processor_config.json").write_text(json.dumps({"image_processor": inner}), "utf-8")
    assert load_renderer(target).digest == renderer.digest


def test_an_image_processor_that_is_not_known_takes_text_only(directory: Path, tmp_path: Path) -> None:
    name = "preprocessor_config.json"
    other = changed(
        directory, tmp_path / "gemma", name, lambda c: c.update(image_processor_type="Gemma3ImageProcessor")
    )
    stranger = load_renderer(other)
    assert rendered(stranger, user(Text("Hi"))).images == ()
    with pytest.raises(TemplateError, match=r"takes no images \(gemma: its image processor is Gemma3ImageProcessor"):
        rendered(stranger, user(image(SMALL)))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("preprocessor_config.json", {"patch_size": 0}, "patch_size must be 1 or more"),
        ("preprocessor_config.json", {"merge_size": "two"}, r"preprocessor_config\.json: Expected `int`"),
        ("preprocessor_config.json", {"min_pixels": 10**9}, r"min_pixels \(1000000000\) is above max_pixels"),
        ("config.json", {"image_token_id": 7_000}, "image_token_id"),
    ],
)
def test_configurations_that_cannot_be(
    directory: Path, tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    target = changed(directory, tmp_path / "m", name, lambda config: config.update(change))
    with pytest.raises(InputError, match=message):
        load_renderer(target)


def test_a_count_that_the_engine_can_check(renderer: ChatRenderer) -> None:
    """What a trainer asserts on ingest: the patches of all grids, merged, are the placeholders of the row."""
    prompt = rendered(renderer, user(image(WIDE), image(SMALL)), calls_look(0), result(0, image(OTHER)))
    total = sum(one.grid[0] * one.grid[1] * one.grid[2] for one in prompt.images)
    assert total // 4 == prompt.ids.count(pad(renderer))
    assert msgspec.json.decode(msgspec.json.encode(prompt), type=Prompt) == prompt
