"""recipes/smollm.toml: a model that others made learns to act in a harness, by SFT and GRPO on an adapter.

Needs a model directory from `scripts/make_smollm2.py --tools`; run by hand with `-m slow` (docs/recipes.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openforgerl.config import load_config
from openforgerl.demo.pipeline import start_model
from openforgerl.demo.settings import DemoConfig, demo_defaults
from openforgerl.errors import InputError
from openforgerl.training.checkpoints import list_checkpoints, verify_checkpoint

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "smollm.toml"
MODEL = os.environ.get("OPENFORGERL_SMOLLM2_TOOLS", "")
CUT_DOWN = (
    'demo.families=["copy","delete"]',
    "demo.eval_tasks=1",
    "sft.steps=6",
    "sft.validate_every=6",
    "train.steps=2",
    "train.groups_per_step=2",
)


def test_the_recipe_is_a_demo_of_another_model_with_adapters(tmp_path: Path) -> None:
    config = load_config(DemoConfig, RECIPE, (), base=demo_defaults("react"))
    for learner in (config.sft.learner, config.train.learner):
        assert learner.lora is not None and learner.lora.rank == 16
        assert learner.optimizer.kind == "adamw"
    assert config.demo.model == "models/smollm2-tools"
    absent = load_config(DemoConfig, RECIPE, [f"demo.model={tmp_path}"], base=demo_defaults("react"))
    with pytest.raises(InputError, match=r"demo\.model: .* is no model directory"):
        start_model(absent)


def test_a_longer_context_is_not_for_another_model() -> None:
    with pytest.raises(Exception, match="context_length is for the model that ships"):
        load_config(DemoConfig, RECIPE, ["demo.context_length=8192"], base=demo_defaults("react"))


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not MODEL, reason="OPENFORGERL_SMOLLM2_TOOLS names no model (docs/recipes.md)")
def test_it_learns_to_act(tmp_path: Path) -> None:
    """Cut down: two families, two GRPO steps. Untrained it solves nothing; every token is accounted for."""
    openforgerl = [sys.executable, "-c", "from openforgerl.cli.main import main; main()"]
    settings = [word for setting in (*CUT_DOWN, f"demo.model={MODEL}") for word in ("-s", setting)]

    def ran(*words: str) -> str:
        done = subprocess.run([*openforgerl, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    ran("demo", "--harness", "react", "-c", str(RECIPE), "--run", str(tmp_path), *settings)
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert report["model"]["parameters"] > 130e6
    assert report["stages"]["untrained"]["pass_at_1"]["value"] == 0
    assert report["curves"]["reward"][0] > 0  # so little SFT suffices for some rollouts...
    assert report["rl"]["updates"] > 0  # ...and not for all of a group, so that GRPO has something to compare
    for account in report["tokens"].values():
        ended = account["trained"] + sum(account["masked"].values()) + sum(account["dropped"].values())
        assert account["sampled"] == ended > 0
    last = list(list_checkpoints(tmp_path / "checkpoints" / "rl").values())[-1]
    assert "adapter/adapter_model.safetensors" in verify_checkpoint(last).files
    audit = json.loads(ran("audit", str(tmp_path), "--json"))
    assert audit["findings"] == []
    (version,) = audit["rescored"]["versions"]  # the weights before the last step, which sampled it
    assert version["tokens"] > 0 and version["max"] < 1e-3
