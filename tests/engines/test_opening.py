"""Opening engines by name, the options, and the tiny model that tests serve."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from openforgerl.engines.opening import engine_options, open_engine
from openforgerl.engines.options import EngineOptions
from openforgerl.engines.scripted import ScriptedEngine
from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.errors import ConfigError, InputError
from openforgerl.testing.tiny_model import ADDED_TOKENS, write_tiny_model
from openforgerl.types import FinishReason, Prompt, Sampling

from .byte_renderer import ByteRenderer


def test_a_spec_fills_the_options() -> None:
    options = engine_options("scripted:a:b.json", EngineOptions(threads=3))
    assert (options.kind, options.path, options.threads) == ("scripted", "a:b.json", 3)


@pytest.mark.parametrize("spec", ["scripted", "scripted:", ":x", ""])
def test_a_bad_spec_says_what_is_accepted(spec: str) -> None:
    with pytest.raises(ConfigError, match="KIND:PATH"):
        open_engine(spec, ByteRenderer())


def test_unknown_kinds_and_missing_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown engine 'vacuum'; known: relay, scripted, sglang, torch, vllm"):
        open_engine("vacuum:x", ByteRenderer())
    with pytest.raises(ConfigError, match=r"engine\.path is empty"):
        open_engine(None, ByteRenderer())
    with pytest.raises(InputError, match=r"config\.json is missing"):
        open_engine(f"torch:{tmp_path}", ByteRenderer())


async def test_opens_a_script(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"answers": [{"text": "hello"}]}')
    engine = open_engine(f"scripted:{path}", ByteRenderer(), EngineOptions(model_name="m", context_length=99))
    assert isinstance(engine, ScriptedEngine)
    assert (engine.model_name, engine.context_length) == ("m", 99)
    ids = [id async for chunk in engine.generate(Prompt(ids=(1,)), Sampling(), affinity="s") for id in chunk.ids]
    assert bytes(ids[:-1]) == b"hello"


async def test_opens_a_model_that_ends_where_the_renderer_says(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    options = EngineOptions(kind="torch", path=str(tmp_path / "model"), context_length=600)
    engine = open_engine(None, ByteRenderer(), options)
    assert isinstance(engine, TorchEngine)
    stream = engine.generate(Prompt(ids=(5, 6, 7)), Sampling(max_tokens=590, seed=0), affinity="s")
    chunks = [chunk async for chunk in stream]
    await engine.close()
    ids = [id for chunk in chunks for id in chunk.ids]
    assert (chunks[-1].finish, ids[-1], ids.count(257)) == (FinishReason.STOP, 257, 1)  # ByteRenderer's only stop id


@pytest.mark.parametrize("name", ["threads", "max_sequences", "max_batch_tokens", "max_waiting", "kv_memory_mb"])
def test_options_name_the_bad_field(name: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=f"{name} must be 1 or more; got 0"):
        msgspec.json.decode(f'{{"{name}": 0}}', type=EngineOptions)


def test_a_scripted_engine_needs_no_torch() -> None:
    code = (
        "import sys, openforgerl.engines.scripted, openforgerl.engines.opening\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_the_tiny_model_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    here = digests(write_tiny_model(tmp_path / "here", seed=3))
    code = (
        "from pathlib import Path; from openforgerl.testing.tiny_model import write_tiny_model\n"
        f"write_tiny_model(Path({str(tmp_path / 'there')!r}), seed=3)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert digests(tmp_path / "there") == here
    other = digests(write_tiny_model(tmp_path / "other", seed=4))
    assert {name for name in here if here[name] != other[name]} == {"model.safetensors"}


def test_the_tiny_model_is_whole(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 600_000
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert [tokenizer.token_to_id(text) for text in ADDED_TOKENS] == list(range(9))
    text = "Grüße, 世界 🌍 \x00\n<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    reader = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "hi"}]
    rendered = reader.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert model.generation_config.eos_token_id == [2, 0]
