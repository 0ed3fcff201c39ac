"""LoRA: what is trained is the adapter, what is saved and served is the sum, and a stop changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.errors import InputError, Interrupted, TrainingError
from openforgerl.training.checkpoints import load_checkpoint, save_checkpoint, verify_checkpoint
from openforgerl.training.learner import Learner
from openforgerl.training.objectives import Likelihood, StepMetrics
from openforgerl.training.options import LearnerOptions, LoraOptions, OptimizerOptions, SftOptions
from openforgerl.training.rescoring import rescore
from openforgerl.training.served import ServedProbe
from openforgerl.training.sft import SftResult, ValidationPoint, train_sft
from openforgerl.types import Sample

MakeSample = Callable[..., Sample]
MakeModel = Callable[..., Any]

LORA = LoraOptions(rank=3, alpha=6.0)
OPTIONS = LearnerOptions(optimizer=OptimizerOptions(lr=2e-2, warmup_steps=0), lora=LORA, min_shared_tokens=2)


def samples(make_sample: MakeSample) -> list[Sample]:
    return [make_sample(f"s{n}", [2, 3, 4 + n, 5, 6], [(2, 5)], logprobs=[-1.0] * 3) for n in range(3)]


@pytest.fixture
def base(tmp_path: Path, make_model: MakeModel) -> Path:
    make_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def trained(base: Path, make_sample: MakeSample) -> Learner:
    learner = Learner(base, OPTIONS)
    for _ in range(2):
        learner.step(samples(make_sample), Likelihood())
    return learner


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def test_only_the_adapter_is_trained_and_it_starts_as_the_base(
    base: Path, make_model: MakeModel, make_sample: MakeSample
) -> None:
    plain, learner = Learner(base, LearnerOptions(min_shared_tokens=2)), Learner(base, OPTIONS)
    assert learner.logprobs(samples(make_sample)) == plain.logprobs(samples(make_sample))
    # two layers: q (32 to 64), k and v (32 to 32), o (64 to 32), gate and up (32 to 48), down (48 to 32), rank 3 each
    sizes = [32 + 64, 32 + 32, 32 + 32, 64 + 32, 32 + 48, 32 + 48, 48 + 32]
    trainable = [param for param in learner.model.parameters() if param.requires_grad]
    assert sum(param.numel() for param in trainable) == 2 * 3 * sum(sizes)
    assert {id(param) for group in learner.optimizers[0].param_groups for param in group["params"]} == {
        id(param) for param in trainable
    }
    metrics = learner.step(samples(make_sample), Likelihood())
    assert metrics.updated
    before = make_model().state_dict()
    after = learner.weights()
    assert after.keys() == before.keys()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.endswith("proj.weight")}
    unmerged = {name: value for name, value in learner.model.state_dict().items() if ".base_layer." in name}
    assert len(unmerged) == 14
    for name, value in unmerged.items():
        assert torch.equal(value, before[name.replace(".base_layer.", ".")]), name


def test_the_gradient_is_that_of_the_merged_weights(base: Path, make_sample: MakeSample) -> None:
    """dL/dA = scale · Bᵀ · dL/dW and dL/dB = scale · dL/dW · Aᵀ, with dL/dW of a model that has W + scale·BA."""
    learner = Learner(base, OPTIONS)
    learner.step(samples(make_sample), Likelihood())
    merged = AutoModelForCausalLM.from_pretrained(base).float()
    merged.load_state_dict(learner.weights())
    whole = Learner(merged, LearnerOptions(min_shared_tokens=2)).gradients(samples(make_sample), Likelihood())
    found = learner.gradients(samples(make_sample), Likelihood())
    layer: Any = learner.model.get_submodule("model.layers.1.self_attn.q_proj")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    of_weight = whole["model.layers.1.self_attn.q_proj.weight"]
    scale = 6.0 / 3
    name = "model.layers.1.self_attn.q_proj.lora_{}.default.weight"
    torch.testing.assert_close(found[name.format("A")], scale * b.T @ of_weight, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found[name.format("B")], scale * of_weight @ a.T, atol=1e-6, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own wrapper asks
def test_the_checkpoint_is_a_whole_model_and_an_adapter_that_peft_reads(
    tmp_path: Path, base: Path, trained: Learner
) -> None:
    path = save_checkpoint(tmp_path / "out", 2, trained)
    manifest = verify_checkpoint(path)
    assert {"model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"} <= set(
        manifest.files
    )
    ids = [2, 3, 4, 5, 6, 7]
    alone = logits(AutoModelForCausalLM.from_pretrained(path), ids)
    start = logits(AutoModelForCausalLM.from_pretrained(base), ids)
    beside = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path / "adapter").eval(), ids)
    assert float((alone - start).abs().max()) > 0.1  # it learned something
    torch.testing.assert_close(alone, beside, atol=1e-4, rtol=1e-4)
    assert json.loads((path / "adapter/adapter_config.json").read_text())["r"] == 3


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_restored_learner_goes_on_as_if_nothing_happened(
    kind: Any, tmp_path: Path, base: Path, make_sample: MakeSample
) -> None:
    options = LearnerOptions(optimizer=OptimizerOptions(kind=kind, lr=1e-2), lora=LORA)
    straight = Learner(base, options)
    straight.step(samples(make_sample), Likelihood())
    path = save_checkpoint(tmp_path / "out", 1, straight)
    straight.step(samples(make_sample)[:2], Likelihood())
    resumed = Learner(base, options)
    assert load_checkpoint(path, resumed).step == 1
    resumed.step(samples(make_sample)[:2], Likelihood())
    assert resumed.updates == 2
    mine = resumed.model.state_dict()
    for name, want in straight.model.state_dict().items():
        assert torch.equal(mine[name], want), name


def test_what_does_not_belong_is_refused_and_changes_nothing(
    tmp_path: Path, base: Path, trained: Learner, make_model: MakeModel, make_sample: MakeSample
) -> None:
    path = save_checkpoint(tmp_path / "out", 2, trained)
    cases = {
        "trained on another base": Learner(make_model(seed=9), OPTIONS),
        "adapter is another": Learner(base, LearnerOptions(lora=LoraOptions(rank=4))),
        "asks for none": Learner(base, LearnerOptions()),
    }
    for said, learner in cases.items():
        before = {name: value.clone() for name, value in learner.model.state_dict().items()}
        with pytest.raises(TrainingError, match=said):
            load_checkpoint(path, learner)
        assert all(torch.equal(value, before[name]) for name, value in learner.model.state_dict().items())
        assert learner.updates == 0
    plain = Learner(base, LearnerOptions())
    plain.step(samples(make_sample), Likelihood())
    with pytest.raises(TrainingError, match="has no adapter"):
        load_checkpoint(save_checkpoint(tmp_path / "plain", 1, plain), trained)


def test_a_changed_adapter_file_is_damage(tmp_path: Path, trained: Learner) -> None:
    path = save_checkpoint(tmp_path / "out", 2, trained)
    file = path / "adapter" / "adapter_config.json"
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(TrainingError, match=r"adapter/adapter_config\.json differs"):
        verify_checkpoint(path)


def test_targets(base: Path) -> None:
    learner = Learner(base, LearnerOptions(lora=LoraOptions(targets=("q_proj", "v_proj"))))
    names = {name.split(".")[-4] for name, param in learner.model.named_parameters() if param.requires_grad}
    assert names == {"q_proj", "v_proj"}
    with pytest.raises(InputError, match=r"learner\.lora\.targets.*nowhere"):
        Learner(base, LearnerOptions(lora=LoraOptions(targets=("nowhere",))))


async def test_the_engine_serves_the_sum_with_its_version_and_an_audit_finds_it(
    tmp_path: Path, base: Path, trained: Learner, make_sample: MakeSample
) -> None:
    engine = TorchEngine(base, model_name="policy", threads=1, stop_ids=())
    try:
        probe = ServedProbe(engine, trained)
        with pytest.raises(TrainingError, match="served and trained weights of version 0 differ"):
            await probe.check(0)  # the base is still served
        path = save_checkpoint(tmp_path / "out", 2, trained)
        await engine.load(path, 2)
        assert await probe.check(2) < 1e-5
        assert engine.weights_version == 2
    finally:
        await engine.close()
    wanted = trained.logprobs(samples(make_sample))
    rows = [
        make_sample(name, [2, 3, 4 + n, 5, 6], [(2, 5)], logprobs=wanted[name])
        for n, name in enumerate(["s0", "s1", "s2"])
    ]
    scored = rescore(rows, temperatures={f"{row.sample_id}-c0": 1.0 for row in rows}, weights={0: path})
    assert scored.versions[0].tokens == 9
    assert scored.versions[0].max < 1e-5
    assert (
        rescore(rows, temperatures={f"{row.sample_id}-c0": 1.0 for row in rows}, weights={0: base}).versions[0].max
        > 1e-2
    )


def test_the_served_sum_is_what_the_file_holds(tmp_path: Path, trained: Learner) -> None:
    path = save_checkpoint(tmp_path / "out", 2, trained)
    saved = load_file(path / "model.safetensors")
    sums = trained.weights()
    assert {name for name in sums if name not in saved} == {"lm_head.weight"}  # tied
    assert all(torch.equal(saved[name], sums[name]) for name in saved)


def test_sft_stopped_and_resumed_ends_in_the_same_weights(tmp_path: Path, base: Path, make_sample: MakeSample) -> None:
    options = SftOptions(learner=OPTIONS, steps=6, batch_samples=2, validate_every=2)
    rows, validation = samples(make_sample), [make_sample("v", [2, 3, 9, 5, 6], [(2, 5)])]

    def train(directory: Path, **more: Any) -> SftResult:
        return train_sft(Learner(base, OPTIONS), rows, validation, options, directory=directory, **more)

    def stop(metrics: StepMetrics, point: ValidationPoint | None) -> None:
        if metrics.update == 5:
            raise Interrupted("here")

    straight = train(tmp_path / "straight")
    assert straight.curve[-1].loss < 0.7 * straight.curve[0].loss
    with pytest.raises(Interrupted):
        train(tmp_path / "stopped", on_step=stop)
    resumed = train(tmp_path / "stopped")
    assert resumed.curve == straight.curve
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (resumed.last / file).read_bytes() == (straight.last / file).read_bytes()
