"""The training rows of one session, as the control API shows them."""

from __future__ import annotations

from collections.abc import Sequence

from openforgerl.trajectory.samples import SamplePolicy, build_samples
from openforgerl.trajectory.tree import build
from openforgerl.types import ModelCall, Rollout, SampleSet, Session, Source


def session_samples(session: Session, calls: Sequence[ModelCall]) -> SampleSet:
    """Rows and account of a session's calls so far. Raises ExactnessError when they contradict each other.

    The source is `metadata.source` (policy, teacher, import) when the opener gave it; else teacher for an engine
    that has no log-probs, because nothing but imitation can use such tokens.
    """
    metadata = session.metadata
    sampled = [call for call in calls if call.sampled_ids]
    silent = bool(sampled) and all(call.logprobs is None for call in sampled)
    given = metadata.get("source")
    known = given in [source.value for source in Source]
    source = Source(given) if known else Source.TEACHER if silent else Source.POLICY
    rollout = Rollout(
        rollout_id=metadata.get("rollout", session.session_id),
        run_id=metadata.get("run", ""),
        task=metadata.get("task", ""),
        task_digest="",
        harness=metadata.get("harness", ""),
        group_id=metadata.get("group", session.session_id),
        index=0,
        seed=0,
        purpose=metadata.get("purpose", "control"),
    )
    return build_samples(build(session.session_id, calls), rollout=rollout, source=source, policy=SamplePolicy())
