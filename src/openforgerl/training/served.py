"""Are the served weights the trained ones? Asked after every weight update; a no stops training.

The embedded trainer asks the engine to sample from fixed prompts and scores the sampled ids with the learner. Both
say the log-prob of the same ids in the same context, so any difference beyond rounding means other weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from openforgerl.errors import TrainingError
from openforgerl.protocols import InferenceEngine
from openforgerl.training.learner import Learner
from openforgerl.types import Prompt, Sample, Sampling, Source, Span

_PROMPT_TOKENS = 24
_ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class ServedProbe:
    """Compares what `engine` serves with what `learner` has."""

    engine: InferenceEngine
    learner: Learner
    limit: float = 1e-3
    """Largest mean |served - trained| log-prob, in nats. fp32 on one machine differs by about 1e-6."""
    prompts: int = 2

    async def check(self, version: int) -> float:
        """The mean difference in nats. Raises TrainingError when the engine serves another version or other weights."""
        samples = [await self._sample(number, version) for number in range(self.prompts)]
        trained = self.learner.logprobs(samples)
        differences = [
            abs(served - scored)
            for sample in samples
            for served, scored in zip(sample.logprobs or (), trained[sample.sample_id], strict=True)
        ]
        mean = sum(differences) / len(differences)
        check_difference(mean, max(differences), version, limit=self.limit)
        return mean

    async def _sample(self, number: int, version: int) -> Sample:
        """An answer to the same arbitrary ids every time. They need not mean anything: weights are compared."""
        vocabulary = int(self.learner.model.get_input_embeddings().weight.shape[0])  # pyright: ignore
        prompt = tuple((7919 * place + 104729 * number + 1) % vocabulary for place in range(_PROMPT_TOKENS))
        sampling = Sampling(max_tokens=_ANSWER_TOKENS, seed=number, temperature=self.learner.options.temperature)
        ids: tuple[int, ...] = ()
        logprobs: tuple[float, ...] = ()
        async for chunk in self.engine.generate(Prompt(ids=prompt), sampling, affinity="served-probe"):
            if chunk.logprobs is None:
                raise TrainingError("the engine gives no log-probs, so served and trained weights cannot be compared")
            check_version("the engine", chunk.weights_version, chunk.weights_version, version)
            ids += chunk.ids
            logprobs += chunk.logprobs
        name = f"served-probe-{number}"
        return Sample(
            sample_id=name,
            attempt_id=name,
            rollout_id=name,
            group_id=name,
            ids=prompt + ids,
            spans=(Span(start=len(prompt), stop=len(prompt) + len(ids), call_id=name, offset=0, state="trained"),),
            logprobs=logprobs,
            source=Source.POLICY,
        )


def check_version(what: str, oldest: int, newest: int, trained: int) -> None:
    """Raises TrainingError unless both versions are the one that was trained last."""
    if oldest != trained or newest != trained:
        served = str(oldest) if oldest == newest else f"{oldest} to {newest}"
        raise TrainingError(
            f"{what} was sampled by weights of version {served}, but the trained ones are version {trained}: the "
            "weight update did not reach the engine. Nothing was trained on it; the same command resumes"
        )


def check_difference(mean: float, largest: float, version: int, *, limit: float) -> None:
    """Raises TrainingError unless the mean difference of log-probs is at most `limit` (a NaN is not)."""
    if mean <= limit:
        return
    raise TrainingError(
        f"served and trained weights of version {version} differ: their log-probs are {mean:.3g} nats apart on average "
        f"(at most {largest:.3g}; train.served_difference allows {limit:.3g}). A weight went to a wrong place, the "
        "engine kept old ones, or its number format is too coarse. Nothing was trained on what it sampled"
    )
