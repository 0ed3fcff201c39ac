"""Several seeds together: what "RL helps" is judged on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from openforgerl.evals.metrics import paired_difference


def summarise_seeds(reports: Sequence[Mapping[str, Any]], *, command: str) -> dict[str, Any]:
    """Pool reports of one config under several seeds. Pairs are (seed, task): the same task, before and after RL."""
    sft = [rate for report in reports for rate in report["rates"]["sft"]]
    rl = [rate for report in reports for rate in report["rates"]["rl"]]
    return {
        "command": command,
        "seeds": [report["seed"] for report in reports],
        "harness": {key: reports[0]["harness"][key] for key in ("name", "version", "digest")},
        "rl_minus_sft": msgspec.to_builtins(paired_difference(rl, sft, seed=0)),
        "pairs": len(rl),
        "by_seed": [
            {
                "seed": report["seed"],
                "pass_at_1": {stage: row["pass_at_1"] for stage, row in report["stages"].items()},
                "rl_minus_sft": report["gain"]["rl_minus_sft"],
                "seconds": report["seconds"],
            }
            for report in reports
        ],
        "config": {key: value for key, value in reports[0]["config"].items() if key != "seed"},
    }
