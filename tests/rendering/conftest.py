"""Four small models: a tokenizer and a chat template each, chosen for where they differ.

* `tiny`: the shipped ChatML template; byte-level BPE.
* `opened`: Llama-like headers, BOS written by the template, a thought opened by the generation prompt,
  earlier thoughts stripped, content trimmed; NFC normaliser.
* `inst`: Mistral-like: no header before an answer, tools before the last user turn; SentencePiece-style BPE
  with byte fallback that marks the first word of a text; BOS also added by its post-processor.
* `pieces`: ChatML from macros, joins, format and slices; added tokens with strip flags and blanks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.rendering.tokenizer import TokenCodec

OPENED = """
{{- bos_token }}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
{{- '<|header|>system<|end_header|>\n\nTools: ' + (tools | tojson(indent=2)) + '<|eot|>' }}
{%- endif %}
{%- for m in messages %}
{{- '<|header|>' + m['role'] + '<|end_header|>\n\n' }}
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}
{%- endif %}
{% generation %}{{ m.content | default('') | trim }}{% endgeneration %}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>\n' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) + '\n</tool_call>' }}
{%- endfor %}
{%- else %}
{{- m.content | trim }}
{%- endif %}
{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\n\n<think>\n' }}{% endif %}
"""

INST = """
{{- bos_token }}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{ '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}
{{- '[INST] ' ~ m.content ~ ' [/INST]' }}
{%- elif m.role == 'assistant' %}
{{- (m.content or '') ~ eos_token }}
{%- elif m.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('system must come first') }}{% endif %}
{{- m.content + '\n\n' }}
{%- else %}
{{- '[RESULT] ' ~ m.content ~ ' [/RESULT]' }}
{%- endif %}
{%- endfor %}
"""

PIECES = """
{%- macro turn(role) %}{{ "<|im_start|>%s\n" % role }}{{ caller() }}{{ '<|im_end|>\n' }}{% endmacro %}
{%- for m in messages %}
{%- call turn(m.role) %}
{%- if m.role == 'tool' %}{{ "<result>{}</result>".format(m.content) }}
{%- elif m.role == 'assistant' %}
{%- set lines = [] %}
{{- ['', m.content or ''] | join }}
{%- for c in m.tool_calls or [] %}
{%- set head = '{"name": "' ~ c.function.name ~ '", "arguments": ' %}
{%- set body = c.function.arguments if c.function.arguments is string else c.function.arguments | tojson %}
{{- '\n' if m.content or not loop.first }}{{ ['<tool_call>', head ~ body ~ '}', '</tool_call>'] | join('\n') }}
{%- endfor %}
{%- else %}{{ m.content[:1] }}{{ m.content[1:] | replace('\t', '    ') }}
{%- endif %}
{%- endcall %}
{%- endfor %}
{%- for t in tools or [] %}{% if loop.index > 40 %}{% break %}{% endif %}{{ t.function.name.upper() }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

TEXTS = [
    "You are an agent in a Linux terminal. Use the tools, then say that you are done.",
    "Write the number of lines of the file to count.txt and move the folder to /workspace/notes.",
    'bash read write edit {"command": "ls -la", "path": "src/main.py", "content": "hello"}',
    "user assistant system tool name arguments think hello world  two   three\n\n\n    indented\n",
    "café déjà vu, naïve; Привет мир; 你好世界; 😀🎉",
] * 3


@dataclass(frozen=True)
class Model:
    """A model directory, our renderer and codec of it, and the transformers tokenizer of it."""

    directory: Path
    renderer: ChatRenderer
    codec: TokenCodec
    reference: Any
    template: str


def byte_level(added: list[AddedToken], *, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def sentence_piece(added: list[AddedToken]) -> Tokenizer:
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *fallback], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [entry for entry in state["added_tokens"] if entry["content"] == "<unk>"]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens(added)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def tokens(*contents: str, **flags: bool) -> list[AddedToken]:
    flags = {"normalized": False, "special": True, **flags}
    return [AddedToken(content, **flags) for content in contents]


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def tiny() -> tuple[Tokenizer, str, dict[str, Any]]:
    added = tokens("<|endoftext|>", "<|im_start|>", "<|im_end|>") + tokens(*MARKS, special=False)
    template = files("openforgerl.rendering").joinpath("templates/tiny.jinja").read_text("utf-8")
    return byte_level(added), template, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def opened() -> tuple[Tokenizer, str, dict[str, Any]]:
    added = tokens("<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>") + tokens(*MARKS[:2], special=False)
    return byte_level(added, normalizer=normalizers.NFC()), OPENED, {"bos_token": "<|begin|>", "eos_token": "<|eot|>"}


def inst() -> tuple[Tokenizer, str, dict[str, Any]]:
    added = tokens("<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[RESULT]", "[/RESULT]")
    bos = {"__type": "AddedToken", "content": "<s>", "special": True, "normalized": False}
    config = {"bos_token": bos, "eos_token": "</s>", "unk_token": "<unk>"}
    return sentence_piece(added), INST, config


def pieces() -> tuple[Tokenizer, str, dict[str, Any]]:
    added = [
        *tokens("<|im_start|>", special=True),
        *tokens("<|im_end|>", rstrip=True),
        *tokens("<result>", lstrip=True, special=False),
        *tokens("</result>", special=False, normalized=True),
        *tokens("REWARD", special=False, single_word=True),
        *tokens("    ", "        ", special=False, normalized=True),
    ]
    return byte_level(added), PIECES, {"eos_token": "<|im_end|>"}


MODELS: Mapping[str, Callable[[], tuple[Tokenizer, str, dict[str, Any]]]] = {
    "tiny": tiny,
    "opened": opened,
    "inst": inst,
    "pieces": pieces,
}


def write_model(directory: Path, name: str) -> Model:
    from transformers import AutoTokenizer  # noqa: PLC0415  # slow to import; only tests that compare pay for it

    tokenizer, template, config = MODELS[name]()
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template, "utf-8")
    whole = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(whole), "utf-8")
    reference = AutoTokenizer.from_pretrained(directory)
    codec = TokenCodec((directory / "tokenizer.json").read_text("utf-8"))
    return Model(directory, load_renderer(directory), codec, reference, template)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A model by name, built once."""
    built: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in built:
            built[name] = write_model(tmp_path_factory.mktemp("models") / name, name)
        return built[name]

    return get
