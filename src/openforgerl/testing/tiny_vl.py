"""What a Qwen3-VL model directory ships for its proxy, tiny: tokenizer, chat template, image processor. No weights.

The scripted engine needs none. The vocabulary is `tiny_model`'s with the family's vision tokens behind it, so every
text has the same ids in both.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from openforgerl.testing.tiny_model import tiny_tokenizer

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")

PATCH, MERGE = 16, 2
MIN_PIXELS, MAX_PIXELS = 64 * 64, 512 * 512
"""Pixels of a resized image: 4 to 256 placeholders of 32 x 32 pixels. The real models go up to 16,384."""

_REFUSED = '{{- raise_exception("this template accepts text parts only, not " ~ part.type) -}}'
_SHOWN = '{{- "<|vision_start|><|image_pad|><|vision_end|>" -}}'


def write_tiny_vl(directory: Path) -> Path:
    """Write the files that `load_renderer` reads of a vision model into `directory` (made when missing)."""
    directory.mkdir(parents=True, exist_ok=True)
    text_only = files("openforgerl.rendering").joinpath("templates/tiny.jinja").read_text("utf-8")
    tokenizer = tiny_tokenizer(text_only)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in VISION_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    before, refusal, after = text_only.partition(_REFUSED)
    if not refusal:
        raise ValueError("templates/tiny.jinja has changed: it no longer refuses parts that are no text")
    (directory / "chat_template.jinja").write_text(before + _SHOWN + after, "utf-8")
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0}),
        ("tokenizer_config.json", _tokenizer_config()),
        ("preprocessor_config.json", _image_processor()),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    return directory


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }


def _image_processor() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
