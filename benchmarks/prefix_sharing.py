"""What training on shared prefixes saves: tokens computed and CPU seconds, against the same rows one by one.

    OMP_NUM_THREADS=1 python benchmarks/prefix_sharing.py [--json docs/results/prefix_sharing.json]

The model is a random Qwen3 of about one million parameters, the size of the demo's. Two kinds of batches:

* drawn rows, four groups of equal size: all share `--prefix` ids, a group a further 40 (the task), and each row has
  its own tail of about `--tail` ids, half of it trained;
* the rows of sessions of `fidelity_scenarios.py`, of `--turns` turns: one that only appends, one whose template strips
  every earlier thought, one with two sub-agents, and a group of eight rollouts of one task.

"Rows" is the same learner without sharing: packed end to end, so it wastes no padding either. Both gradients are
compared.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from fidelity import play, reconstruct
from fidelity_scenarios import Agent, Scenario, Session, Size, linear, thinking_stripped, two_subagents
from transformers import Qwen3Config, Qwen3ForCausalLM

from openforgerl.rendering import load_renderer
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.training.learner import Learner
from openforgerl.training.objectives import ClippedPolicy
from openforgerl.training.options import LearnerOptions
from openforgerl.training.packing import pack, plan_micro_batches, row_of
from openforgerl.types import Sample, Source, Span

VOCABULARY = 1536
NO_SHARING = 1 << 30


def model() -> Qwen3ForCausalLM:
    """The demo's shape: width 128, four layers, two heads of 64."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=65536,
            tie_word_embeddings=True,
            initializer_range=0.1,
        )
    ).float()


def samples(rows: int, prefix: int, tail: int) -> list[Sample]:
    """Rows of four groups; the second half of every tail is trained."""
    rng = random.Random(prefix)
    common = [rng.randrange(VOCABULARY) for _ in range(prefix)]
    tasks = [[rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(4)]
    made: list[Sample] = []
    for number in range(rows):
        length = rng.randrange(tail // 2, tail * 3 // 2)
        ids = common + tasks[number % 4] + [rng.randrange(VOCABULARY) for _ in range(length)]
        start = len(ids) - length // 2
        made.append(
            Sample(
                sample_id=f"s{number}",
                attempt_id=f"a{number}",
                rollout_id=f"r{number}",
                group_id=f"g{number % 4}",
                ids=tuple(ids),
                spans=(Span(start=start, stop=len(ids), call_id="c", offset=0, state="trained"),),
                logprobs=tuple(-7.0 - rng.random() for _ in range(len(ids) - start)),
                source=Source.POLICY,
                advantage=rng.choice([-1.0, 1.0]),
            )
        )
    return made


def member(number: int) -> Scenario:
    """One rollout of a group: the same system prompt, tools and task, another course."""

    def scenario(session: Session) -> None:
        agent = Agent.new(session)
        session.random.seed(number)
        for _ in range(session.size.turns):
            agent.turn()

    return scenario


TRACES: dict[str, Sequence[Scenario]] = {
    "linear": (linear,),
    "stripped thinking": (thinking_stripped,),
    "two sub-agents": (two_subagents,),
    "group of 8": tuple(member(number) for number in range(8)),
}


def traces(turns: int) -> dict[str, list[Sample]]:
    """The training rows of every trace, as the orchestrator makes them from recorded calls."""
    size = Size(turns=turns, system=1200, answer=30, observation=60)
    made: dict[str, list[Sample]] = {}
    with tempfile.TemporaryDirectory() as folder:
        renderer = load_renderer(write_tiny_model(Path(folder)))
        for name, scenarios in TRACES.items():
            rows = [sample for scenario in scenarios for sample in reconstruct(play(scenario, renderer, size)).samples]
            made[name] = [
                msgspec.structs.replace(row, sample_id=f"s{number}", advantage=1.0 - 2.0 * (number % 2))
                for number, row in enumerate(rows)
            ]
    return made


def measure(batch: list[Sample], min_shared: int, repeats: int) -> tuple[int, float, dict[str, torch.Tensor]]:
    """Tokens computed, CPU seconds of the fastest of `repeats` forward and backward passes, gradient."""
    learner = Learner(model(), LearnerOptions(micro_batch_tokens=32768, min_shared_tokens=min_shared))
    best = float("inf")
    gradient: dict[str, torch.Tensor] = {}
    for _ in range(repeats):
        started = time.process_time()
        gradient = learner.gradients(batch, ClippedPolicy())
        best = min(best, time.process_time() - started)
    return computed(batch, learner.options), best, gradient


def computed(batch: list[Sample], options: LearnerOptions) -> int:
    """Ids that go through the model, cut into micro-batches as the learner cuts them."""
    rows = [row_of(sample, 1.0, needs_logprobs=True) for sample in batch]
    cuts = plan_micro_batches(rows, budget=options.micro_batch_tokens, min_shared=options.min_shared_tokens)
    return sum(int(pack(cut, min_shared=options.min_shared_tokens).ids_N.numel()) for cut in cuts)


def compare(name: str, batch: list[Sample], repeats: int) -> dict[str, Any]:
    """Shared against row by row; prints a line."""
    row_tokens, row_seconds, row_gradient = measure(batch, NO_SHARING, repeats)
    tokens, seconds, gradient = measure(batch, LearnerOptions().min_shared_tokens, repeats)
    flat, row_flat = (torch.cat([g[key].flatten() for key in sorted(g)]) for g in (gradient, row_gradient))
    difference = float((flat - row_flat).norm() / row_flat.norm())
    print(
        f"{name:18} | {len(batch):4d} | {row_tokens:12d} {tokens:8d} {row_tokens / tokens:6.1f} | "
        f"{row_seconds:11.2f} {seconds:7.2f} {row_seconds / seconds:6.1f} | {difference:.1e}",
        flush=True,
    )
    return {
        "batch": name,
        "rows": len(batch),
        "tokens_in_rows": row_tokens,
        "tokens_computed": tokens,
        "cpu_seconds_rows": round(row_seconds, 2),
        "cpu_seconds": round(seconds, 2),
        "gradient_difference": float(f"{difference:.1e}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tail", type=int, default=150, help="mean tokens of a drawn row after the shared parts")
    parser.add_argument("--prefix", type=int, nargs="*", default=[214, 1100, 2017], help="shared tokens of drawn rows")
    parser.add_argument("--turns", type=int, default=6, help="of the sessions; 0 = none")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    print(f"{torch.get_num_threads()} torch thread(s); of {arguments.repeats} passes the fastest")
    print("batch              | rows | tokens: rows   shared  ratio | CPU s: rows  shared  ratio | gradient difference")
    batches = {f"prefix of {length}": samples(arguments.rows, length, arguments.tail) for length in arguments.prefix}
    batches |= traces(arguments.turns) if arguments.turns else {}
    lines = [compare(name, batch, arguments.repeats) for name, batch in batches.items()]
    if arguments.json:
        command = (
            f"OMP_NUM_THREADS=1 python benchmarks/prefix_sharing.py --rows {arguments.rows} --tail {arguments.tail} "
            f"--prefix {' '.join(map(str, arguments.prefix))} --turns {arguments.turns} --repeats {arguments.repeats}"
        )
        arguments.json.write_text(json.dumps({"command": command, "batches": lines}, indent=2) + "\n")


if __name__ == "__main__":
    main()
