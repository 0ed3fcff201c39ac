"""What training on shared prefixes saves: tokens computed and CPU seconds, against the same rows one by one.

    OMP_NUM_THREADS=1 python benchmarks/prefix_sharing.py [--rows 16] [--tail 150] [--prefix 214 1100 2017]

The model is a random Qwen3 of about one million parameters, the size of the demo's. Rows are four groups of equal
size: all share `prefix` ids, a group a further 40 (the task), and each row has its own tail, half of it trained.
"Rows" is the same learner without sharing: packed end to end, so it wastes no padding either. Both gradients are
compared.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from openforgerl.training.learner import Learner
from openforgerl.training.objectives import ClippedPolicy
from openforgerl.training.options import LearnerOptions
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
            max_position_embeddings=8192,
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


def measure(batch: list[Sample], min_shared: int, repeats: int) -> tuple[int, float, dict[str, torch.Tensor]]:
    """Tokens computed, CPU seconds of the fastest of `repeats` forward and backward passes, gradient."""
    learner = Learner(model(), LearnerOptions(micro_batch_tokens=8192, min_shared_tokens=min_shared))
    best = float("inf")
    gradient: dict[str, torch.Tensor] = {}
    for _ in range(repeats):
        started = time.process_time()
        gradient = learner.gradients(batch, ClippedPolicy())
        best = min(best, time.process_time() - started)
    return learner.step(batch, ClippedPolicy()).tokens_computed, best, gradient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tail", type=int, default=150, help="mean tokens of a row after the shared parts")
    parser.add_argument("--prefix", type=int, nargs="+", default=[214, 1100, 2017], help="shared tokens")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    print(f"{arguments.rows} rows, tails of about {arguments.tail}, {torch.get_num_threads()} torch thread(s)")
    print("prefix | tokens: rows   packed  ratio | CPU s: rows  packed  ratio | gradient difference")
    for prefix in arguments.prefix:
        batch = samples(arguments.rows, prefix, arguments.tail)
        row_tokens, row_seconds, row_gradient = measure(batch, NO_SHARING, arguments.repeats)
        tokens, seconds, gradient = measure(batch, 8, arguments.repeats)
        flat, row_flat = (torch.cat([g[name].flatten() for name in sorted(g)]) for g in (gradient, row_gradient))
        difference = float((flat - row_flat).norm() / row_flat.norm())
        print(
            f"{prefix:6d} | {row_tokens:12d} {tokens:8d} {row_tokens / tokens:6.1f} | "
            f"{row_seconds:11.2f} {seconds:7.2f} {row_seconds / seconds:6.1f} | {difference:.1e}"
        )


if __name__ == "__main__":
    main()
