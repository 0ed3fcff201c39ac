"""A tiny random Qwen3-VL with all that its real directory has: what vLLM, veRL and transformers load by themselves.

`testing.tiny_vl` writes what a proxy reads; here are the weights, the video token and the processors' classes, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from openforgerl.testing.tiny_vl import MERGE, PATCH, write_tiny_vl

VIDEO_TOKEN = "<|video_pad|>"


def write_seeing_model(directory: Path, *, seed: int = 0) -> Path:
    """Write the model into `directory` (made when missing); about 0.3 million parameters."""
    write_tiny_vl(directory)
    tokenizer: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(VIDEO_TOKEN, special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {
        name: tokenizer.token_to_id(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start", "vision_end")
    }
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
        "rope_parameters": rope, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": PATCH,
        "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1, 2], "initializer_range": 0.2,
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.15)  # large enough that what is seen matters to what is said
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "pad_token_id": 0}))
    images = json.loads((directory / "preprocessor_config.json").read_text())
    images |= {"processor_class": "Qwen3VLProcessor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    video = {name: value for name, value in images.items() if name != "image_processor_type"}
    video |= {"video_processor_type": "Qwen3VLVideoProcessor"}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    known = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(known | {"processor_class": "Qwen3VLProcessor"}))
    return directory
