"""A checkpoint is whole or it is not loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from openforgerl.errors import TrainingError
from openforgerl.training import checkpoints
from openforgerl.training.checkpoints import (
    discard_after,
    list_checkpoints,
    load_checkpoint,
    prune,
    save_checkpoint,
    verify_checkpoint,
)
from openforgerl.training.learner import Learner
from openforgerl.training.objectives import Likelihood
from openforgerl.training.options import LearnerOptions, OptimizerOptions
from openforgerl.types import Sample

MakeSample = Callable[..., Sample]
MakeModel = Callable[..., Any]


@pytest.fixture
def trained(make_model: MakeModel, make_sample: MakeSample) -> Learner:
    learner = Learner(make_model(), LearnerOptions(optimizer=OptimizerOptions(kind="muon", lr=1e-3)))
    learner.step([make_sample("s", [2, 3, 4, 5, 6], [(2, 5)])], Likelihood())
    return learner


def state(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in learner.model.state_dict().items()}


@pytest.mark.parametrize("tied", [True, False])
def test_a_restored_learner_goes_on_as_if_nothing_happened(
    tmp_path: Path, make_model: MakeModel, make_sample: MakeSample, tied: bool
) -> None:
    options = LearnerOptions(optimizer=OptimizerOptions(kind="adamw", lr=1e-2))
    samples = [make_sample(f"s{n}", [2, 3, 4 + n, 5], [(2, 4)]) for n in range(3)]
    straight = Learner(make_model(tie_word_embeddings=tied), options)
    straight.step(samples, Likelihood())
    path = save_checkpoint(tmp_path, 1, straight)
    straight.step(samples[:2], Likelihood())
    restored = Learner(make_model(seed=9, tie_word_embeddings=tied), options)
    assert load_checkpoint(path, restored).step == 1
    assert restored.updates == 1
    restored.step(samples[:2], Likelihood())
    for name, want in state(straight).items():
        assert torch.equal(state(restored)[name], want), name


def test_an_engine_can_serve_the_directory(tmp_path: Path, trained: Learner) -> None:
    companions = tmp_path / "base"
    companions.mkdir()
    (companions / "tokenizer.json").write_text("{}")
    (companions / "chat_template.jinja").write_text("x")
    (companions / "generation_config.json").write_text('{"eos_token_id": 7}')
    (companions / "model.safetensors").write_bytes(b"never copied")
    (companions / "notes.txt").write_text("never copied")
    path = save_checkpoint(tmp_path / "checkpoints", 3, trained, companions=companions)
    assert sorted(file.name for file in path.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "learner.pt",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((path / "generation_config.json").read_text()) == {"eos_token_id": 7}
    config = (path / "config.json").read_text()
    assert "openforgerl" not in config  # our attention is the trainer's business
    (path / "generation_config.json").write_text("{}")
    served = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([[2, 3, 4, 5]])
    trained.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(served.eval()(input_ids=ids).logits, trained.model(input_ids=ids).logits)


def test_weights_are_what_was_trained(tmp_path: Path, trained: Learner, make_model: MakeModel) -> None:
    path = save_checkpoint(tmp_path, 1, trained)
    served = AutoModelForCausalLM.from_pretrained(path).state_dict()
    initial = make_model().state_dict()
    for name, value in state(trained).items():
        assert torch.equal(served[name], value)
    assert not torch.equal(served["lm_head.weight"], initial["lm_head.weight"])


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "extra", "manifest", "no manifest", "format", "step"])
def test_a_damaged_checkpoint_is_never_loaded(
    tmp_path: Path, trained: Learner, make_model: MakeModel, damage: str
) -> None:
    path = save_checkpoint(tmp_path, 1, trained)
    verify_checkpoint(path)
    weights = path / "model.safetensors"
    data = weights.read_bytes()
    manifest = path / "manifest.json"
    match damage:
        case "flip":
            weights.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
        case "cut":
            (path / "learner.pt").write_bytes((path / "learner.pt").read_bytes()[:-1])
        case "missing":
            (path / "config.json").unlink()
        case "extra":
            (path / "model-2.safetensors").write_bytes(data)
        case "manifest":
            manifest.write_bytes(manifest.read_bytes()[:-9])
        case "no manifest":
            manifest.unlink()
        case "format":
            manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
        case "step":
            manifest.write_text(manifest.read_text().replace('"step": 1', '"step": 2'))
        case _:
            raise AssertionError(damage)
    learner = Learner(make_model(seed=5), LearnerOptions(optimizer=OptimizerOptions(kind="muon")))
    before = state(learner)
    with pytest.raises(TrainingError, match=str(path)):
        load_checkpoint(path, learner)
    assert all(torch.equal(before[name], value) for name, value in state(learner).items())
    assert learner.updates == 0


def test_another_models_checkpoint_is_refused(tmp_path: Path, trained: Learner, make_model: MakeModel) -> None:
    path = save_checkpoint(tmp_path, 1, trained)
    wider = Learner(make_model(intermediate_size=64), LearnerOptions(optimizer=OptimizerOptions(kind="muon")))
    before = state(wider)
    with pytest.raises(TrainingError, match="another model or optimizer"):
        load_checkpoint(path, wider)
    other = Learner(make_model(), LearnerOptions(optimizer=OptimizerOptions(kind="adamw")))
    with pytest.raises(TrainingError, match="2 optimizer states for 1"):
        load_checkpoint(path, other)
    assert all(torch.equal(before[name], value) for name, value in state(wider).items())


def test_a_kill_while_writing_leaves_nothing_visible(
    tmp_path: Path, trained: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, trained)
    calls = 0

    def killed(path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "_sync", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, trained)
    monkeypatch.undo()
    assert list(list_checkpoints(tmp_path)) == [1]
    assert list(tmp_path.glob(".*"))  # the half-written one is there, hidden
    assert verify_checkpoint(save_checkpoint(tmp_path, 2, trained)).step == 2
    assert not list(tmp_path.glob(".*"))


def test_keeping_and_discarding(tmp_path: Path, trained: Learner) -> None:
    for step in (1, 2, 3, 10, 11):
        save_checkpoint(tmp_path, step, trained)
    (tmp_path / ".partial-step-000012").mkdir()
    (tmp_path / "step-notes").mkdir()
    assert list(list_checkpoints(tmp_path)) == [1, 2, 3, 10, 11]
    prune(tmp_path, 2, protect=[2])
    assert list(list_checkpoints(tmp_path)) == [2, 10, 11]
    discard_after(tmp_path, 10)
    assert list(list_checkpoints(tmp_path)) == [2, 10]
    assert not list(tmp_path.glob(".*"))
    again = save_checkpoint(tmp_path, 10, trained, extra={"note": "second"})
    assert verify_checkpoint(again).extra == {"note": "second"}
    assert list_checkpoints(tmp_path / "absent") == {}
