"""Several seeds together: what "RL helps" is judged on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from openforgerl.evals import paired_difference_over_runs


def summarise_seeds(reports: Sequence[Mapping[str, Any]], *, command: str) -> dict[str, Any]:
    """Pool reports of one config under several seeds. The interval covers the choice of tasks and of seeds."""
    runs = [(report["rates"]["sft"], report["rates"]["rl"]) for report in reports]
    return {
        "command": command,
        "seeds": [report["seed"] for report in reports],
        "harness": {key: reports[0]["harness"][key] for key in ("name", "version", "digest")},
        "rl_minus_sft": msgspec.to_builtins(paired_difference_over_runs(runs)),
        "tasks": len(runs[0][0]),
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
