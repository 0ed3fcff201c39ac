"""What the demo found, from the run folder alone: `report.json`, a table and an HTML page."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from openforgerl.demo import plots
from openforgerl.demo.pipeline import HELD_OUT_SPLITS, SECONDS, STAGES, TEACHER, TRAIN, start_model
from openforgerl.demo.settings import DemoConfig, small_note
from openforgerl.evals import TaskResult, compare_stages, summarise, summarise_by
from openforgerl.evals.summary import task_values
from openforgerl.orchestrator.assembly import RunFolder
from openforgerl.store import StepRecord
from openforgerl.training.checkpoints import list_checkpoints, verify_checkpoint
from openforgerl.types import Attempt, Failure, Rollout, SampleSet, Task, Totals, Verdict

HEADLINE_SPLITS = ("heldout", "heldout-phrasing")
"""Held-out tasks of the trained families: what the table and the gain are about. Families that no stage ever
trained on ask another question and are reported apart."""
SPLIT_LABELS = {
    "heldout": "new parameters",
    "heldout-phrasing": "new wording",
    "heldout-family": "new families",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything the report is made from, read from the run folder."""

    config: DemoConfig
    tasks: Sequence[Task]
    rollouts: Mapping[str, Rollout]
    attempts: Sequence[Attempt]
    accounts: Mapping[str, SampleSet]
    steps: Sequence[StepRecord]
    curve: Sequence[Mapping[str, float]]
    seconds: Mapping[str, float]

    def of(self, purpose: str) -> list[Attempt]:
        """Attempts of a purpose, in order of beginning."""
        return [attempt for attempt in self.attempts if self.rollouts[attempt.rollout_id].purpose == purpose]

    def results(self, stage: str) -> list[TaskResult]:
        """Verdicts per held-out task for one stage, labelled by how the task is held out."""
        passes: dict[str, list[bool]] = {}
        for attempt in self.of(f"eval:{stage}"):
            if isinstance(attempt.outcome, Verdict):
                passes.setdefault(self.rollouts[attempt.rollout_id].task, []).append(attempt.outcome.passed)
        return [
            TaskResult(task=task.name, passed=tuple(passes[task.name]), labels={"split": str(task.metadata["split"])})
            for task in self.tasks
            if task.name in passes
        ]


async def read_facts(folder: RunFolder, config: DemoConfig, tasks: Sequence[Task]) -> Facts:
    """Read the run's rows once."""
    attempts = await folder.store.attempts()
    checkpoints = list_checkpoints(folder.path / "checkpoints" / "sft")
    extra = verify_checkpoint(checkpoints[max(checkpoints)]).extra
    return Facts(
        config=config,
        tasks=tasks,
        rollouts={rollout.rollout_id: rollout for rollout in await folder.store.rollouts()},
        attempts=attempts,
        accounts=await folder.store.samples([attempt.attempt_id for attempt in attempts]),
        steps=await folder.store.steps("rl"),
        curve=extra["curve"],
        seconds=await folder.store.value(SECONDS) or {},
    )


def build_report(facts: Facts) -> dict[str, Any]:
    """The whole of `report.json`."""
    config = facts.config
    everything = {stage: facts.results(stage) for stage in STAGES}
    by_split = {stage: summarise_by(everything[stage], "split", seed=config.seed) for stage in STAGES}
    results = {stage: [r for r in everything[stage] if r.labels["split"] in HEADLINE_SPLITS] for stage in STAGES}
    gain = compare_stages(results["sft"], results["rl"], seed=config.seed)
    base = start_model(config)
    model = {"parameters": (base / "model.safetensors").stat().st_size // 4, "base": _digest(base)}
    return {
        "seed": config.seed,
        "stages": {stage: msgspec.to_builtins(summarise(results[stage], seed=config.seed)) for stage in STAGES},
        "gain": {"rl_minus_sft": msgspec.to_builtins(gain.pass_at_1)},
        "rates": {stage: task_values(results[stage], "pass_at_1") for stage in STAGES},
        "splits": {
            split: {stage: msgspec.to_builtins(by_split[stage][split].pass_at_1) for stage in STAGES}
            for split in HELD_OUT_SPLITS
            if split in by_split["rl"]
        },
        "evaluation": {
            "tasks": len(results["rl"]),
            "splits": list(HEADLINE_SPLITS),
            "attempts": config.demo.eval_attempts,
            "temperature": 1.0,
        },
        "curves": {
            "reward": [step.metrics["reward_mean"] for step in facts.steps],
            "sft_validation": list(facts.curve),
        },
        "sft": _sft(facts),
        "rl": _rl(facts),
        "tokens": {purpose: _account(facts, purpose) for purpose in _purposes()},
        "failures": {purpose: _failures(facts.of(purpose)) for purpose in _purposes()},
        "harness": _harness(facts),
        "prompt_tokens": _prompt_tokens(facts),
        "note": small_note(config),
        "model": model,
        "seconds": round(sum(facts.seconds.values()), 1),
        "seconds_by_stage": dict(facts.seconds),
        "config": msgspec.to_builtins(config),
    }


def write_report(report: Mapping[str, Any], directory: Path) -> Path:
    """Write `report.json` and `report.html`; the page's path."""
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    environment = Environment(
        loader=PackageLoader("openforgerl.demo", "pages"), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template("report.html.j2").render(
        report=report,
        labels=plots.LABELS,
        split_labels=SPLIT_LABELS,
        reasons=_reasons,
        plots={
            "held_out": Markup(plots.held_out(report["stages"])),
            "reward": Markup(plots.reward_per_step(report["curves"]["reward"])),
            "validation": Markup(plots.validation_curve(report["curves"]["sft_validation"])),
            "tokens": Markup(plots.token_account(report["tokens"])),
        },
    )
    path = directory / "report.html"
    path.write_text(page)
    return path


def _digest(base: Path) -> str:
    """sha256 of the weights: as noted beside the shipped ones, else computed."""
    if (base / "SHA256SUMS").is_file():
        return (base / "SHA256SUMS").read_text().split()[0]
    with (base / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _purposes() -> list[str]:
    return [TEACHER, TRAIN, *(f"eval:{stage}" for stage in STAGES)]


def _account(facts: Facts, purpose: str) -> dict[str, Any]:
    """Where every sampled token of a purpose ended. Samples say what may train; here is what did."""
    sampled = trained = 0
    masked: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    splits = {task.name: str(task.metadata.get("split")) for task in facts.tasks}
    for attempt in facts.of(purpose):
        found = facts.accounts.get(attempt.attempt_id)
        if found is None:
            continue
        sampled += found.totals.sampled
        masked.update(found.totals.masked)
        dropped.update(found.totals.dropped)
        if purpose.startswith("eval:"):
            masked["evaluation"] += found.totals.trained
        elif splits[facts.rollouts[attempt.rollout_id].task] == "validation":
            masked["validation"] += found.totals.trained
        else:
            trained += found.totals.trained
    if purpose == TRAIN:
        skipped = sum(step.metrics["tokens_skipped"] for step in facts.steps)
        learned = sum(step.metrics["tokens_trained"] for step in facts.steps)
        masked["equal rewards"] += skipped
        dropped["group dropped"] += trained - skipped - learned
        trained = learned
    account = Totals(sampled=sampled, trained=trained, masked=dict(+masked), dropped=dict(+dropped))
    return msgspec.to_builtins(account)


def _failures(attempts: Sequence[Attempt]) -> dict[str, Any]:
    failures = [attempt.outcome for attempt in attempts if isinstance(attempt.outcome, Failure)]
    return {
        "attempts": len(attempts),
        "graded": len(attempts) - len(failures),
        "origins": dict(Counter(f"{failure.origin}: {failure.kind}" for failure in failures)),
    }


def _sft(facts: Facts) -> dict[str, Any]:
    solved = [a for a in facts.of(TEACHER) if isinstance(a.outcome, Verdict) and a.outcome.passed]
    samples = sum(len(facts.accounts[attempt.attempt_id].samples) for attempt in solved)
    return {"rollouts": len(solved), "samples": samples, "steps": facts.config.sft.steps}


def _prompt_tokens(facts: Facts) -> int:
    """Tokens before the first sampled one, in the GRPO row that has the fewest."""
    starts = [
        sample.spans[0].start
        for attempt in facts.of(TRAIN)
        if (found := facts.accounts.get(attempt.attempt_id)) is not None
        for sample in found.samples
        if sample.spans
    ]
    return min(starts, default=0)


def _rl(facts: Facts) -> dict[str, Any]:
    metrics = [step.metrics for step in facts.steps]
    differences = [
        update["logprob_difference_max"] for row in metrics for update in row["updates"] if update["updated"]
    ]
    return {
        "steps": len(metrics),
        "rollouts": sum(row["rollouts"] for row in metrics),
        "group_size": facts.config.train.group_size,
        "skipped_groups": sum(row["groups_degenerate"] for row in metrics),
        "dropped_groups": sum(row["groups_dropped"] for row in metrics),
        "updates": len(differences),
        "logprob_difference": max(differences, default=None),
    }


def _harness(facts: Facts) -> dict[str, Any]:
    """One attempt's record, after checking that all attempts ran the same package under the same name."""
    records = [attempt.harness for attempt in facts.attempts if attempt.harness.get("user_agents")]
    first = records[-1]
    return {
        "name": first["name"],
        "version": first.get("version", ""),
        "digest": sorted({str(record.get("package_digest", "")) for record in records})[0],
        "digests": sorted({str(record.get("package_digest", "")) for record in records}),
        "user_agents": sorted({agent for record in records for agent in record["user_agents"]}),
        "argv": first["argv"],
    }


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "none"
