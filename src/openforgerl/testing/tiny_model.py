"""A tiny random model with everything a real one ships: weights, tokenizer, chat template.

Qwen3 architecture with grouped-query attention (so that every path of the engine is used), 0.3 million
parameters, a small byte-level BPE with Qwen3's added tokens. Written without torch and without transformers;
the same seed gives the same bytes.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ADDED_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_CONTROL_TOKENS = 3
"""The first three are control tokens (`special`); the others are text that parsers look for."""

_VOCABULARY = 512
_HIDDEN = 128
_LAYERS = 2
_HEADS = 2
_KV_HEADS = 1
_HEAD_DIM = 64
_FEED_FORWARD = 256
_CONTEXT = 32768

_TEXTS = (
    "You are an agent in a Linux terminal. Use the tools, then say that you are done.",
    "Write the number of lines of the file to count.txt and move the folder to /workspace/notes.",
    'bash read write edit {"command": "ls -la", "path": "src/main.py", "content": "hello"}',
    '{"type": "function", "function": {"name": "bash", "description": "Run a command", "parameters": '
    '{"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}',
)
"""What the merges are learned from, beside the chat template."""


def write_tiny_model(directory: Path, *, seed: int = 0) -> Path:
    """Write config, weights, tokenizer and chat template into `directory` (made when missing); returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    template = files("openforgerl.rendering").joinpath("templates/tiny.jinja").read_text("utf-8")
    tokenizer = tiny_tokenizer(template)
    size: int = tokenizer.get_vocab_size()
    save_file(_weights(size, seed), directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template, "utf-8")
    for name, content in (
        ("config.json", _config(size)),
        ("generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0}),
        ("tokenizer_config.json", _tokenizer_config()),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    return directory


def tiny_tokenizer(template: str) -> Tokenizer:
    """A byte-level BPE whose merges come from `template` and a few lines of terminal talk."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [template, *_TEXTS],
        trainers.BpeTrainer(
            vocab_size=_VOCABULARY,
            min_frequency=2,
            special_tokens=[
                AddedToken(text, special=index < _CONTROL_TOKENS, normalized=False)
                for index, text in enumerate(ADDED_TOKENS)
            ],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def _config(vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": _HIDDEN,
        "intermediate_size": _FEED_FORWARD,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": _CONTEXT,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": _CONTEXT,
        "clean_up_tokenization_spaces": False,
    }


def _weights(vocabulary: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """Random, but scaled so that logits have a spread of about 1 and attention is far from uniform."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float) -> NDArray[np.float32]:
        return (generator.standard_normal((rows, columns)) * scale).astype(np.float32)

    def ones(count: int) -> NDArray[np.float32]:
        return np.ones(count, dtype=np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocabulary, _HIDDEN, 0.1), "model.norm.weight": ones(_HIDDEN)}
    wide = _HIDDEN**-0.5
    for layer in range(_LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        mlp = f"model.layers.{layer}.mlp"
        weights |= {
            f"model.layers.{layer}.input_layernorm.weight": ones(_HIDDEN),
            f"model.layers.{layer}.post_attention_layernorm.weight": ones(_HIDDEN),
            f"{attention}.q_proj.weight": matrix(_HEADS * _HEAD_DIM, _HIDDEN, wide),
            f"{attention}.k_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN, wide),
            f"{attention}.v_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN, wide),
            f"{attention}.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD_DIM, wide),
            f"{attention}.q_norm.weight": ones(_HEAD_DIM),
            f"{attention}.k_norm.weight": ones(_HEAD_DIM),
            f"{mlp}.gate_proj.weight": matrix(_FEED_FORWARD, _HIDDEN, wide),
            f"{mlp}.up_proj.weight": matrix(_FEED_FORWARD, _HIDDEN, wide),
            f"{mlp}.down_proj.weight": matrix(_HIDDEN, _FEED_FORWARD, _FEED_FORWARD**-0.5),
        }
    return weights
