"""One optimizer update on recorded samples, exactly: the same gradient however the batch is cut or packed."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from openforgerl.errors import InputError, TrainingError
from openforgerl.plugins import load
from openforgerl.training.algorithms import token_weights
from openforgerl.training.objectives import Likelihood, Objective, StepMetrics, TokenSums
from openforgerl.training.optimizers import build_optimizers, learning_rate
from openforgerl.training.options import LearnerOptions
from openforgerl.training.packing import Pack, Row, pack, plan_micro_batches, row_of
from openforgerl.training.prefix_attention import ATTENTION_NAME
from openforgerl.types import Sample


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Likelihood of samples under the current weights, over `tokens` trained tokens (each weighs the same)."""

    loss: float
    """Mean negative log-prob, nats per token."""
    accuracy: float
    """Share of tokens that are the model's most likely one."""
    tokens: int


class Adapter(Protocol):
    """What a learner asks of an adapter (`lora.LoraAdapter`): its weights, and their sum with the model's."""

    def state(self) -> dict[str, Tensor]: ...
    def merged(self) -> dict[str, Tensor]: ...
    def restore(self, weights: Mapping[str, Tensor], merged: Mapping[str, Tensor]) -> None: ...
    def write(self, directory: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class _Scores:
    """The model's view of a pack's loss tokens."""

    logprob_L: Tensor
    entropy_L: Tensor
    correct_L: Tensor


class Learner:
    """A causal language model, its optimizers and how many updates they have made.

    The learner owns the model: it sets the packed attention on it and keeps it in evaluation mode, because
    dropout would make the trainer's log-probs another policy's than those recorded. It draws no random numbers:
    the same samples give the same weights, in whatever order they come, bit by bit on the same machine and
    thread count.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        options: LearnerOptions,
        *,
        planned_steps: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """`model`: a model, or a directory in Hugging Face's layout (read in fp32). `planned_steps`: length of the
        run in optimizer updates, for a decaying learning rate; `train_sft` and `GrpoLoop` set it themselves. Raises
        InputError when the directory holds no model, or its attention cannot be packed."""
        self.options = options
        self.planned_steps = planned_steps
        self.device = torch.device(device)
        self.model = _read_model(model).to(self.device).eval()  # pyright: ignore[reportArgumentType]
        try:
            self.model.set_attn_implementation(ATTENTION_NAME)
        except ValueError as error:
            raise InputError(f"{type(self.model).__name__} cannot use packed attention: {error}") from error
        self.adapter: Adapter | None = None
        if options.lora is not None:
            self.adapter = load("adapter", "lora")(self.model, options.lora)
        self.optimizers = build_optimizers(self.model, options.optimizer)
        self.updates = 0

    def step(self, samples: Sequence[Sample], objective: Objective) -> StepMetrics:
        """One optimizer update on all samples together.

        Raises InputError for a sample that cannot be trained so, TrainingError naming the sample when a log-prob,
        the loss or a gradient is not finite; weights and optimizer are then as before.
        """
        rows = self._rows(samples, objective)
        batches = self._batches(rows)
        masked = sum(sample.span_tokens - sample.trained_tokens for sample in samples)
        if not batches:
            return StepMetrics(update=self.updates, updated=False, samples=len(samples), tokens_masked=masked)
        self._clear_gradients()
        sums = TokenSums()
        loss, computed = 0.0, 0
        try:
            for micro in batches:
                loss += self._accumulate(micro, objective, sums)
                computed += int(micro.ids_N.numel())
            norm = self._clip_gradients(batches, objective)
            rate = learning_rate(self.options.optimizer, self.updates, self.planned_steps)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
        finally:
            self._clear_gradients()
        self.updates += 1
        statistics: dict[str, Any] = dict(sums.statistics())
        return StepMetrics(
            update=self.updates,
            updated=True,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            samples=len(samples),
            tokens_trained=sums.count,
            tokens_masked=masked,
            tokens_in_rows=sum(len(row.ids) for row in rows if row.places),
            tokens_computed=computed,
            micro_batches=len(batches),
            **statistics,
        )

    def gradients(self, samples: Sequence[Sample], objective: Objective) -> dict[str, Tensor]:
        """Gradient of the batch's loss by parameter name, without clipping and without an update (for audits)."""
        self._clear_gradients()
        try:
            for micro in self._batches(self._rows(samples, objective)):
                self._accumulate(micro, objective, TokenSums())
            return {
                name: param.grad.detach().clone()
                for name, param in self.model.named_parameters()
                if param.grad is not None
            }
        finally:
            self._clear_gradients()

    def evaluate(self, samples: Sequence[Sample]) -> Evaluation:
        """Loss and accuracy on the trained tokens of `samples`; changes nothing. InputError when there are none."""
        loss, correct, tokens = 0.0, 0, 0
        with torch.no_grad():
            for micro in self._batches(self._rows(samples, Likelihood())):
                scores = self._scores(micro)
                loss -= float(scores.logprob_L.double().sum())
                correct += int(scores.correct_L.sum())
                tokens += int(scores.logprob_L.numel())
        if not tokens:
            raise InputError("nothing to evaluate: the samples have no trained token")
        return Evaluation(loss / tokens, correct / tokens, tokens)

    def logprobs(self, samples: Sequence[Sample]) -> dict[str, tuple[float, ...]]:
        """Sample id → log-prob of each of its trained tokens under the current weights; changes nothing (for audits).

        Samples without a trained token are left out. InputError when two samples have one id.
        """
        found: dict[str, tuple[float, ...]] = {}
        if len({sample.sample_id for sample in samples}) != len(samples):
            raise InputError("two samples have the same id, so their log-probs could not be told apart")
        with torch.no_grad():
            for micro in self._batches(self._rows(samples, Likelihood())):
                scores: list[float] = self._scores(micro).logprob_L.double().tolist()
                at = 0
                for row in micro.rows:
                    found[row.sample_id] = tuple(scores[at : at + len(row.places)])
                    at += len(row.places)
        return found

    def optimizer_state(self) -> dict[str, Any]:
        """What a checkpoint needs besides the weights."""
        return {"updates": self.updates, "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def weights(self) -> dict[str, Tensor]:
        """The weights that answer, by the names of the model's own: an adapter is added to what it is beside."""
        return self.model.state_dict() if self.adapter is None else self.adapter.merged()

    def restore(
        self,
        weights: dict[str, Tensor],
        optimizer_state: dict[str, Any],
        adapter: dict[str, Tensor] | None = None,
    ) -> None:
        """Go back to a saved state; `adapter` are the adapter's weights, and `weights` then the sum. TrainingError when
        it belongs to another model, adapter or optimizer; then unchanged."""
        states: list[dict[str, Any]] = optimizer_state["optimizers"]
        if (adapter is None) != (self.adapter is None):
            has, wants = ("no adapter", "one") if adapter is None else ("an adapter", "none")
            raise TrainingError(f"the checkpoint has {has}, and learner.lora asks for {wants}: use the run's options")
        own = self.weights()
        absent = [name for name in own if name not in weights and not self._is_tied(name, weights)]
        foreign = [name for name in weights if name not in own or weights[name].shape != own[name].shape]
        if absent or foreign or len(states) != len(self.optimizers):
            raise TrainingError(
                f"the checkpoint is of another model or optimizer: missing {absent[:3]}, unknown or of another shape "
                f"{foreign[:3]}, {len(states)} optimizer states for {len(self.optimizers)}"
            )
        if self.adapter is None or adapter is None:
            self.model.load_state_dict(weights, strict=False)
        else:
            self.adapter.restore(adapter, weights)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        self.updates = int(optimizer_state["updates"])

    def _is_tied(self, name: str, weights: dict[str, Tensor]) -> bool:
        """Whether `name` shares its memory with a parameter that `weights` has (tied embeddings are saved once)."""
        own = self.weights()
        return any(own[other].data_ptr() == own[name].data_ptr() for other in weights if other in own)

    def _rows(self, samples: Sequence[Sample], objective: Objective) -> list[Row]:
        weights = token_weights(samples, objective.aggregation)
        return [
            row_of(sample, weight, needs_logprobs=objective.needs_logprobs)
            for sample, weight in zip(samples, weights, strict=True)
        ]

    def _batches(self, rows: Sequence[Row]) -> list[Pack]:
        options = self.options
        return [
            pack(micro, min_shared=options.min_shared_tokens, device=self.device)
            for micro in plan_micro_batches(
                rows, budget=options.micro_batch_tokens, min_shared=options.min_shared_tokens
            )
        ]

    def _scores(self, micro: Pack) -> _Scores:
        """One forward pass. Logits are made only where a loss token is predicted."""
        at_U, back_L = torch.unique(micro.at_L, return_inverse=True)
        output: Any = self.model(
            input_ids=micro.ids_N[None],
            position_ids=micro.position_N[None],
            use_cache=False,
            logits_to_keep=at_U,
            segments=micro.segments,
            longest_row=max(len(row.ids) for row in micro.rows),
        )
        logits_UV: Tensor = output.logits[0]
        if logits_UV.shape[0] != at_U.shape[0]:
            raise InputError(f"{type(self.model).__name__} ignores logits_to_keep; it cannot be trained packed")
        logprob_UV = torch.log_softmax(logits_UV.float() / self.options.temperature, dim=-1)
        with torch.no_grad():
            entropy_U = -(logprob_UV.exp() * logprob_UV).sum(-1)
            best_U = logprob_UV.argmax(-1)
        logprob_L = logprob_UV[back_L, micro.target_L]
        finite_L = torch.isfinite(logprob_L.detach())
        if not bool(finite_L.all()):
            names = sorted({micro.rows[int(row)].sample_id for row in micro.row_L[~finite_L]})
            raise TrainingError(f"the model's log-prob of sample {', '.join(names[:5])} is not finite; no update made")
        return _Scores(logprob_L, entropy_U[back_L], best_U[back_L] == micro.target_L)

    def _accumulate(self, micro: Pack, objective: Objective, sums: TokenSums) -> float:
        """Add one micro-batch's gradient; its loss."""
        scores = self._scores(micro)
        terms = objective.terms(scores.logprob_L, micro)
        loss = float(terms.loss.detach())
        if not torch.isfinite(terms.loss.detach()):
            names = ", ".join(row.sample_id for row in micro.rows[:5])
            raise TrainingError(f"the loss of the micro-batch with samples {names} is {loss}; no update made")
        terms.loss.backward()
        sums.add(micro, terms, scores.logprob_L, scores.entropy_L, scores.correct_L)
        return loss

    def _clip_gradients(self, batches: Sequence[Pack], objective: Objective) -> float:
        """Scale the gradient to `max_grad_norm`; its norm before. TrainingError naming the sample when not finite."""
        norm = self._norm()
        if not bool(torch.isfinite(norm)):
            culprit = self._culprit(batches, objective)
            raise TrainingError(f"the gradient is not finite because of {culprit}; no update made")
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.options.optimizer.max_grad_norm, norm)
        return float(norm)

    def _culprit(self, batches: Sequence[Pack], objective: Objective) -> str:
        """The first sample whose own gradient is not finite (a slow search, on failure only)."""
        for row in (row for micro in batches for row in micro.rows):
            self._clear_gradients()
            alone = pack([row], min_shared=self.options.min_shared_tokens, device=self.device)
            objective.terms(self._scores(alone).logprob_L, alone).loss.backward()
            if not bool(torch.isfinite(self._norm())):
                return f"sample {row.sample_id}"
        return "the sum over the batch (each sample alone is finite)"

    def _norm(self) -> Tensor:
        gradients = [param.grad for param in self.model.parameters() if param.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def _clear_gradients(self) -> None:
        for param in self.model.parameters():
            param.grad = None


@contextmanager
def no_progress_bars() -> Generator[None]:
    """transformers draws bars on stderr for reading and writing files; what is shown is the command line's business."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _read_model(model: PreTrainedModel | str | Path) -> PreTrainedModel:
    if isinstance(model, PreTrainedModel):
        return model
    path = Path(model)
    if not (path / "config.json").is_file():
        raise InputError(f"{path} is not a model directory: it has no config.json")
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read a causal language model from {path}: {error}") from error
    return loaded
