"""The demo model's prompt, tokenizer and architecture (neither torch nor transformers needed).

The tokenizer is a byte-level BPE of 1,536 entries: every byte is encodable, digits stand alone, letters
are split from punctuation and from the space before them, so that a name has the same token wherever it
stands. The head of a tool call is one pre-token, and so is a tool's line of JSON, which a harness repeats in
every prompt: the harnesses' tool lines have vocabulary entries of their own. Those are ordinary vocabulary, not
added tokens: text that looks like them stays text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from openforgerl.errors import TemplateError

VOCABULARY = 1536
ADDED_TOKENS: tuple[str, ...] = (
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

PRE_TOKENS = "|".join(
    (
        r'\{"type": "function", [^\n]*',
        r'\{"name": "\w+", "arguments": \{"\w+": "',
        r'"\}\}|", "|": "|"',
        r"\\.",
        r"\.?\p{L}+",
        r"\p{N}",
        r" +|\n+|\s",
        r'[^\s\p{L}\p{N}"\\]+',
    )
)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "torch_dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
"""`config.json`: Qwen3 with 1.05 million parameters. Heads are 64 wide: with 32 it never learns to copy names."""

Conversation = Sequence[dict[str, Any]]


def harness_prompt(harness: str) -> dict[str, Any]:
    """`system` (text) and `tools` (OpenAI form), exactly as `pi` or `react` sends them in /workspace."""
    prompts: dict[str, dict[str, Any]] = json.loads(
        files("openforgerl.demo").joinpath("prompts.json").read_text("utf-8")
    )
    return prompts["pi" if harness == "pi" else "react"]


def template_text() -> str:
    """The Qwen3-style chat template that ships with the model."""
    return files("openforgerl.rendering").joinpath("templates/tiny.jinja").read_text("utf-8")


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse(message: str) -> None:
    raise TemplateError(message)


@cache
def _compiled_template() -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse  # pyright: ignore[reportArgumentType]
    return environment.from_string(template_text())


def render(messages: Conversation, tools: Conversation | None = None, **variables: Any) -> str:
    """The template's text for a conversation, as transformers would render it."""
    return _compiled_template().render(messages=messages, tools=tools, **variables)


def tool_lines() -> list[str]:
    """Every harness's tools as the template writes them; each line gets one vocabulary entry."""
    return [_to_json(tool) for harness in ("pi", "react") for tool in harness_prompt(harness)["tools"]]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of exactly `VOCABULARY` entries from `texts`."""
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=i < _CONTROL_TOKENS, normalized=False) for i, text in enumerate(ADDED_TOKENS)]
    whole = ["".join(piece for piece, _ in split.pre_tokenize_str(text)) for text in tool_lines()]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(whole),
            min_frequency=1,
            special_tokens=added,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    state = json.loads(tokenizer.to_str())
    vocabulary: dict[str, int] = state["model"]["vocab"]
    for text in whole:
        vocabulary[text] = len(vocabulary)
    state["model"]["ignore_merges"] = True
    if len(vocabulary) != VOCABULARY:
        raise ValueError(f"the texts yield {len(vocabulary)} entries, not {VOCABULARY}; give more varied texts")
    return Tokenizer.from_str(json.dumps(state, ensure_ascii=False))


def tokenizer_config() -> dict[str, Any]:
    """`tokenizer_config.json` for transformers' AutoTokenizer."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG["max_position_embeddings"],
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }


def generation_config() -> dict[str, Any]:
    """`generation_config.json`."""
    return {"do_sample": True, "temperature": 1.0, "eos_token_id": [2, 0], "pad_token_id": 0}
