"""How fast the torch engine samples from a one-million-parameter Qwen3 behind a 700-token shared prefix.

Beside it a plain loop: the same model with transformers' own cache, every row holding its own copy of the
prefix, no reuse between calls (what `model.generate` does, without its extras). Prints tokens a second of wall
time and of CPU time, and the ratios.

    python benchmarks/engine_prefix.py [--prefix 700] [--tail 40] [--new 96] [--batches 1,4,16] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from openforgerl.engines.torch_engine import TorchEngine
from openforgerl.types import Prompt, Sampling

VOCABULARY = 1536


def model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def prompts(count: int, prefix: int, tail: int) -> list[list[int]]:
    numbers = random.Random(0)
    shared = [numbers.randrange(VOCABULARY) for _ in range(prefix)]
    return [shared + [numbers.randrange(VOCABULARY) for _ in range(tail)] for _ in range(count)]


async def engine_tokens(engine: TorchEngine, rows: list[list[int]], new: int) -> int:
    async def one(row: list[int]) -> int:
        stream = engine.generate(Prompt(ids=tuple(row)), Sampling(max_tokens=new), affinity="benchmark")
        return sum([len(chunk.ids) async for chunk in stream])

    return sum(await asyncio.gather(*(one(row) for row in rows)))


@torch.inference_mode()
def plain_tokens(plain: Any, rows: list[list[int]], new: int) -> int:
    cache = DynamicCache(config=plain.config)
    ids = torch.tensor(rows)
    for _ in range(new):
        logits = plain(ids, None, None, cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        ids = torch.multinomial(logits.float().softmax(-1), 1)
    return len(rows) * new


async def measure(arguments: argparse.Namespace) -> list[dict[str, float]]:
    engine = TorchEngine(model(), threads=1, stop_ids=(), max_sequences=max(arguments.batches))
    plain = model()
    results: list[dict[str, float]] = []
    for batch in arguments.batches:
        rows = prompts(batch, arguments.prefix, arguments.tail)
        await engine_tokens(engine, rows[:1], 2)
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = await engine_tokens(engine, rows, arguments.new)
        engine_wall, engine_cpu = time.perf_counter() - wall, time.process_time() - cpu
        wall, cpu = time.perf_counter(), time.process_time()
        plain_tokens(plain, rows, arguments.new)
        plain_wall, plain_cpu = time.perf_counter() - wall, time.process_time() - cpu
        results.append(
            {
                "batch": batch,
                "engine_tokens_per_s": round(tokens / engine_wall, 1),
                "engine_tokens_per_cpu_s": round(tokens / engine_cpu, 1),
                "plain_tokens_per_s": round(tokens / plain_wall, 1),
                "plain_tokens_per_cpu_s": round(tokens / plain_cpu, 1),
                "ratio_cpu": round(plain_cpu / engine_cpu, 2),
            }
        )
        print(" ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    await engine.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=700, help="shared tokens")
    parser.add_argument("--tail", type=int, default=40, help="prompt tokens of each row's own")
    parser.add_argument("--new", type=int, default=96, help="tokens sampled a row")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = asyncio.run(measure(arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
