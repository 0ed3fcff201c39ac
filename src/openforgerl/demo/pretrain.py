"""Pre-train the demo's base checkpoint on synthetic text: `python -m openforgerl.demo.pretrain --out DIR`.

Two stages share one schedule. The first part is plain documents, packed into rows, with loss only
on tokens that the document determines. The rest is short conversations behind the real prompt
of a harness (computed once per batch and back-propagated once), with loss on the assistant's tokens only.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import click
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from openforgerl.demo import corpus, tiny
from openforgerl.training.optimizers import build_optimizers
from openforgerl.training.options import OptimizerOptions

TURN_END = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the checkpoint, besides the code and the machine's arithmetic."""

    seed: int = 0
    tokens: int = 8_000_000
    """Tokens trained on in all, prompt tokens counted once per batch."""
    plain_share: float = 0.4
    plain_rows: int = 12
    plain_length: int = 192
    chat_rows: int = 24
    lr: float = 1e-2
    warmup_steps: int = 50
    decay_share: float = 0.45
    """Last share of the tokens over which the learning rate falls to 2 %."""
    weight_decay: float = 0.01

    def learning_rate(self, step: int, seen: int) -> float:
        """The rate of 0-based `step`, before which `seen` tokens were trained on."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.lr * warm * min(1.0, max(0.02, (1 - seen / self.tokens) / self.decay_share))


DEFAULTS = Settings()


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows behind an optional shared prefix. Shapes: prefix (P), ids and loss (B, T), names (B, T)."""

    prefix: Tensor
    ids: Tensor
    loss: Tensor
    """True where the token is trained on."""
    names: Tensor
    """Number of the copied name that the token belongs to, 0 for none (measured, not trained on)."""

    @property
    def tokens(self) -> int:
        return self.prefix.numel() + self.ids.numel()


class Encoder:
    """Token ids of document pieces, remembered: pieces repeat a lot."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        if (ids := self._known.get(text)) is None:
            ids = self.tokenizer.encode(text).ids
            if len(self._known) < 100_000:
                self._known[text] = ids
        return ids


def plain_batch(encode: Encoder, rng: Random, rows: int, length: int) -> Batch:
    """Documents packed end to end into rows of `length` tokens."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    loss = torch.zeros(rows, length, dtype=torch.bool)
    names = torch.zeros(rows, length, dtype=torch.long)
    number = 0
    for row in range(rows):
        row_ids: list[int] = []
        row_kinds: list[int] = []
        row_names: list[int] = []
        while len(row_ids) < length:
            for text, kind in corpus.plain_document(rng):
                piece = encode(text)
                number += kind == corpus.COPIED
                row_ids += piece
                row_kinds += [kind] * len(piece)
                row_names += [number if kind == corpus.COPIED else 0] * len(piece)
        ids[row] = torch.tensor(row_ids[:length])
        loss[row] = torch.tensor(row_kinds[:length]) > 0
        names[row] = torch.tensor(row_names[:length])
    return Batch(torch.zeros(0, dtype=torch.long), ids, loss, names)


def _assistant_spans(ids: list[int], tokenizer: Tokenizer) -> list[bool]:
    """True from after each `<|im_start|>assistant\\n` up to and with the turn's end."""
    head = tokenizer.encode("<|im_start|>assistant\n").ids
    end = tokenizer.token_to_id(TURN_END)
    inside, flags = False, [False] * len(ids)
    for place, token in enumerate(ids):
        flags[place] = inside
        if inside and token == end:
            inside = False
        elif ids[place - len(head) + 1 : place + 1] == head:
            inside = True
    return flags


def chat_batch(tokenizer: Tokenizer, rng: Random, rows: int, harness: str) -> Batch:
    """One-call conversations behind the harness's own system prompt and tools."""
    prompt = tiny.harness_prompt(harness)
    prefix = tokenizer.encode(tiny.render([{"role": "system", "content": prompt["system"]}], prompt["tools"])).ids
    encoded = [tokenizer.encode(tiny.render(corpus.conversation(rng, harness))).ids for _ in range(rows)]
    width = max(map(len, encoded))
    ids = torch.zeros(rows, width, dtype=torch.long)
    loss = torch.zeros(rows, width, dtype=torch.bool)
    for row, tokens in enumerate(encoded):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        loss[row, : len(tokens)] = torch.tensor(_assistant_spans(tokens, tokenizer))
    turns = (torch.arange(rows)[:, None] + 1).expand(-1, width)
    return Batch(torch.tensor(prefix), ids, loss, torch.where(loss, turns, 0))


def hidden_states(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """Last hidden states of the rows, (B, T, D); the prefix runs once for all of them."""
    if not batch.prefix.numel():
        return model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    rows = batch.ids.shape[0]
    once = model.model(input_ids=batch.prefix[None], use_cache=True).cache
    shared = DynamicCache()
    for index, layer in enumerate(once.layers):
        shared.update(layer.keys.expand(rows, -1, -1, -1), layer.values.expand(rows, -1, -1, -1), index)
    return model.model(input_ids=batch.ids, cache=shared, use_cache=True).last_hidden_state


def loss_of(model: Qwen3ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy over trained tokens, and for each of them whether the top token is right."""
    wanted = batch.loss[:, 1:]
    logits = model.lm_head(hidden_states(model, batch)[:, :-1][wanted])
    targets = batch.ids[:, 1:][wanted]
    return F.cross_entropy(logits, targets), logits.argmax(-1) == targets


@torch.no_grad()
def exact_share(model: Qwen3ForCausalLM, batch: Batch) -> float:
    """Share of copied names (or of whole assistant turns) whose every token is the model's top choice."""
    _, right = loss_of(model, batch)
    numbers = batch.names[:, 1:][batch.loss[:, 1:]]
    wrong = torch.zeros(int(numbers.max()) + 1).index_add_(0, numbers, (~right).float())
    present = numbers[numbers > 0].unique()
    return (wrong[present] == 0).float().mean().item()


def batches(settings: Settings, tokenizer: Tokenizer) -> Iterator[tuple[str, int, Batch]]:
    """(stage, tokens before it, batch) until the token budget is spent."""
    rng, encode, seen = Random(settings.seed), Encoder(tokenizer), 0
    while seen < settings.tokens:
        if seen < settings.plain_share * settings.tokens:
            stage, batch = "plain", plain_batch(encode, rng, settings.plain_rows, settings.plain_length)
        else:
            harness = "pi" if rng.random() < 0.6 else "react"
            stage, batch = "chat", chat_batch(tokenizer, rng, settings.chat_rows, harness)
        yield stage, seen, batch
        seen += batch.tokens


def fresh_model(seed: int) -> Qwen3ForCausalLM:
    """An untrained network; output projections start small, the rest at 1/sqrt(width)."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**tiny.CONFIG)).float()
    for name, param in model.named_parameters():
        if param.dim() == 2:
            narrow = 0.5 if ("o_proj" in name or "down_proj" in name) else 1.0
            torch.nn.init.normal_(param, 0.0, 0.02 if "embed" in name else narrow / param.shape[1] ** 0.5)
    return model


def set_learning_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """The same rate for every parameter."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def pretrain(settings: Settings, tokenizer: Tokenizer, log: Path) -> Qwen3ForCausalLM:
    """Train from scratch; one JSON line to `log` every 50 steps."""
    model = fresh_model(settings.seed)
    optimizers = build_optimizers(
        model, OptimizerOptions(kind="muon", lr=settings.lr, weight_decay=settings.weight_decay)
    )
    judge = Random(settings.seed + 1_000_003)
    checks = {"plain": plain_batch(Encoder(tokenizer), judge, 32, settings.plain_length)}
    checks |= {harness: chat_batch(tokenizer, judge, 64, harness) for harness in ("pi", "react")}
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as lines:
        for step, (stage, seen, batch) in enumerate(batches(settings, tokenizer)):
            set_learning_rate(optimizers, settings.learning_rate(step, seen))
            loss, _ = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step % 50 == 0:
                row: dict[str, Any] = {"step": step, "stage": stage, "tokens": seen, "loss": round(loss.item(), 4)}
                row["exact"] = {name: round(exact_share(model, check), 4) for name, check in checks.items()}
                row["seconds"] = round(time.monotonic() - started, 1)
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                click.echo(json.dumps(row))
    return model


def save_checkpoint(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Everything transformers and our own engine need to load the model."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.detach().contiguous() for n, p in model.named_parameters() if n != "lm_head.weight"}
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    for name, value in (
        ("config.json", tiny.CONFIG),
        ("tokenizer_config.json", tiny.tokenizer_config()),
        ("generation_config.json", tiny.generation_config()),
    ):
        (out / name).write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    (out / "chat_template.jinja").write_text(tiny.template_text(), "utf-8")


_README = """\
# Base checkpoint of the demo

A Qwen3-architecture network of {parameters:,} parameters with its own byte-level BPE of {vocabulary} entries and a
chat template, pre-trained from nothing on synthetic text by

    python -m openforgerl.demo.pretrain --out {out} --seed {seed} --tokens {tokens} --lr {lr} --threads {threads}

in {minutes:.0f} minutes of wall clock ({threads} thread(s), torch {torch}). `pretraining.jsonl` is its log, a line
every 50 steps. The text (`openforgerl/demo/corpus.py`) is shell-like documents, and one- and two-call conversations
behind the two harnesses' own prompts. It holds no demo task and none of their wordings, so the model can carry names
into tool calls but has not been told what any family asks for. Numbers differ slightly on another machine.

`sha256sum -c SHA256SUMS` checks the files.
"""


def write_readme(out: Path, settings: Settings, threads: int, seconds: float) -> None:
    """How this checkpoint came about."""
    text = _README.format(
        parameters=sum(tensor.numel() for tensor in load_file(str(out / "model.safetensors")).values()),
        vocabulary=tiny.VOCABULARY,
        out=out.as_posix() if not out.is_absolute() else "DIR",
        seed=settings.seed,
        tokens=settings.tokens,
        lr=settings.lr,
        threads=threads,
        minutes=seconds / 60,
        torch=torch.__version__,
    )
    (out / "README.md").write_text(text, "utf-8")


def write_checksums(out: Path) -> None:
    """`SHA256SUMS` over every other file, in the form that sha256sum -c reads."""
    names = sorted(path.name for path in out.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256((out / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (out / "SHA256SUMS").write_text("".join(lines), "utf-8")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory for the checkpoint.")
@click.option("--seed", default=DEFAULTS.seed, show_default=True)
@click.option("--tokens", default=DEFAULTS.tokens, show_default=True, help="Tokens to train on.")
@click.option("--lr", default=DEFAULTS.lr, show_default=True, help="Peak learning rate.")
@click.option("--threads", default=1, show_default=True, help="Torch threads.")
def main(out: Path, seed: int, tokens: int, lr: float, threads: int) -> None:
    """Train tokenizer and base model from nothing."""
    torch.set_num_threads(threads)
    settings = Settings(seed=seed, tokens=tokens, lr=lr)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny.train_tokenizer(corpus.tokenizer_texts(seed))
    click.echo(json.dumps(asdict(settings)))
    started = time.monotonic()
    save_checkpoint(pretrain(settings, tokenizer, out / "pretraining.jsonl"), tokenizer, out)
    write_readme(out, settings, threads, time.monotonic() - started)
    write_checksums(out)


if __name__ == "__main__":
    main()
