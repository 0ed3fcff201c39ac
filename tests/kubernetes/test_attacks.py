"""Programs that try to forge their reward, in pods of the fake cluster: the same as in every other sandbox."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[1] / "attacks" / "test_through_the_harness.py"
_spec = importlib.util.spec_from_file_location("attacks_through_the_harness", SOURCE)
assert _spec is not None and _spec.loader is not None
attacks: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(attacks)

SETTINGS = ("sandbox.kubernetes.image=system:1", "sandbox.kubernetes.grace=1", "limits.memory_mb=512")


@pytest.mark.sandbox
async def test_only_the_honest_program_is_rewarded(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cluster for all of them: starting it costs more than an attack."""
    monkeypatch.setenv("KUBECONFIG", str(served))
    rewards: dict[str, tuple[float, int]] = {}
    for name, script in {"honest": attacks.HONEST, **attacks.ATTACKS}.items():
        (root := tmp_path / name.replace(" ", "-")).mkdir()
        result = attacks.run_program(root, script, "kubernetes", *SETTINGS)
        rewards[name] = (result["pass_at_1"]["value"], result["failed"])
    assert rewards == {"honest": (1.0, 0)} | dict.fromkeys(attacks.ATTACKS, (0.0, 0))
