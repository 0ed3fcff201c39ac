"""Options refuse what they do not know or cannot mean."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from openforgerl.training.options import GrpoOptions, LearnerOptions, OptimizerOptions, SftOptions


@pytest.mark.parametrize("kind", [GrpoOptions, LearnerOptions, OptimizerOptions, SftOptions])
def test_unknown_keys_are_errors_and_defaults_are_whole(kind: type[Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `lrr`"):
        msgspec.convert({"lrr": 1}, kind)
    assert msgspec.convert(msgspec.to_builtins(kind()), kind) == kind()


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (OptimizerOptions, "lr", 0.0),
        (OptimizerOptions, "lr", float("inf")),
        (OptimizerOptions, "betas", (0.9, 1.0)),
        (OptimizerOptions, "max_grad_norm", 0.0),
        (LearnerOptions, "temperature", 0.0),
        (LearnerOptions, "micro_batch_tokens", 0),
        (SftOptions, "batch_samples", 0),
        (GrpoOptions, "group_size", 1),
        (GrpoOptions, "updates_per_step", 5),
        (GrpoOptions, "clip_dual", 1.0),
        (GrpoOptions, "clip_low", 1.0),
    ],
)
def test_values_without_meaning_name_their_field(kind: type[Any], name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be "):
        kind(**{name: value})


def test_options_cost_no_torch() -> None:
    """The config room composes these; importing them must not load torch."""
    code = "import sys, openforgerl.training.options, openforgerl.evals; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
