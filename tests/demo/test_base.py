"""The shipped base checkpoint: tokenizer, weights, and that transformers loads both."""

from __future__ import annotations

import hashlib
import json
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from openforgerl.demo import bundle, corpus, families, pretrain, tiny, words

BASE = bundle.bundled_tasks().parent / "base"
TOKENIZER = Tokenizer.from_file(str(BASE / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def test_checksums_cover_every_file() -> None:
    lines = (BASE / "SHA256SUMS").read_text("utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    assert set(sums) == {path.name for path in BASE.iterdir()} - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((BASE / name).read_bytes()).hexdigest() == digest, name


def test_template_and_config_are_the_code_s() -> None:
    assert (BASE / "chat_template.jinja").read_text("utf-8") == tiny.template_text()
    assert json.loads((BASE / "config.json").read_text("utf-8")) == tiny.CONFIG


def test_weights_are_small_and_of_the_stated_shape() -> None:
    # 1536·128 embeddings + 4·(4·128·128 + 3·128·384 + 2·128 + 2·64) + 128 = 1,050,240
    tensors = load_file(str(BASE / "model.safetensors"))
    assert sum(tensor.numel() for tensor in tensors.values()) == 1_050_240
    assert (BASE / "model.safetensors").stat().st_size <= 4_500_000
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_tokenizer_is_the_one_its_training_makes() -> None:
    again = tiny.train_tokenizer(corpus.tokenizer_texts(pretrain.DEFAULTS.seed))
    assert json.loads(again.to_str()) == json.loads(TOKENIZER.to_str())


def test_vocabulary_has_no_hole_and_no_unknown() -> None:
    vocabulary = TOKENIZER.get_vocab()
    assert sorted(vocabulary.values()) == list(range(tiny.VOCABULARY))
    assert [TOKENIZER.id_to_token(i) for i in range(9)] == list(tiny.ADDED_TOKENS)
    assert TOKENIZER.token_to_id("<|im_end|>") == tiny.CONFIG["eos_token_id"]


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_every_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(_ids(text), skip_special_tokens=False) == text


def test_names_digits_and_tool_lines_are_single_tokens() -> None:
    for noun in words.NOUNS:
        assert len(_ids(noun)) == 1 and _ids(f'"{noun}')[-1:] == _ids(noun) and _ids(f"/{noun}")[-1:] == _ids(noun)
    assert len(_ids("2026")) == 4
    for line in tiny.tool_lines():
        assert len(_ids(line)) == 1
    assert len(_ids('{"name": "bash", "arguments": {"command": "')) == 1


@pytest.mark.parametrize(("harness", "tokens"), [("pi", 104), ("react", 83)])
def test_the_constant_prompt_is_short(harness: str, tokens: int) -> None:
    prompt = tiny.harness_prompt(harness)
    text = tiny.render([{"role": "system", "content": prompt["system"]}], prompt["tools"])
    assert len(_ids(text)) == tokens


def test_transformers_renders_and_encodes_the_same() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    prompt = tiny.harness_prompt("pi")
    for seed in range(20):
        turns = [
            {"role": "system", "content": prompt["system"]},
            *corpus.conversation(Random(seed), "pi"),
            {"role": "user", "content": "Größe 漢字 <b> it's 1.5 \\n\n\n  end"},
        ]
        text = tokenizer.apply_chat_template(
            turns, tools=prompt["tools"], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        ours = tiny.render(turns, prompt["tools"], add_generation_prompt=True, enable_thinking=False)
        assert text == ours
        assert tokenizer(text)["input_ids"] == _ids(ours)
        assert tokenizer.decode(_ids(ours), clean_up_tokenization_spaces=False) == ours


def test_the_base_copies_names_but_knows_no_family(model: Any) -> None:
    judge = Random(5)
    for harness in ("pi", "react"):
        assert pretrain.exact_share(model, pretrain.chat_batch(TOKENIZER, judge, 64, harness)) >= 0.75
    prompt = tiny.harness_prompt("pi")
    solved = 0
    for place in bundle.plan():
        if place.split != "validation":
            continue
        puzzle = families.build(place.family, place.split, place.seed)
        turns = [
            {"role": "system", "content": prompt["system"]},
            {"role": "user", "content": families.instruction(place.family, puzzle, place.phrasing)},
        ]
        ids = torch.tensor([_ids(tiny.render(turns, prompt["tools"], add_generation_prompt=True))])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        said = TOKENIZER.decode(answer[0, ids.shape[1] :].tolist(), skip_special_tokens=False)
        command = puzzle.pi[0].arguments.get("command")
        solved += command is not None and f'"{command}"' in said
    assert solved <= 3
