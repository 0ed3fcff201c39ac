"""A second look at what was recorded: does every sample repeat its calls, and does the account add up?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from openforgerl.conversation import digest_tools
from openforgerl.errors import ExactnessError
from openforgerl.trajectory.breaks import BROKEN, Break, find_breaks
from openforgerl.trajectory.samples import account, check_exact, dropped_calls
from openforgerl.trajectory.tree import predecessors
from openforgerl.types import ModelCall, Role, Sample, SampleSet, ThreadRole, Totals, Trajectory


class CallAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one call's sampled tokens: sampled = trained + masked + dropped."""

    call_id: str
    thread: str
    role: ThreadRole
    status: str
    sampled: int
    trained: int
    masked: dict[str, int]
    dropped: dict[str, int]
    """Why tokens are in no row (`trajectory.samples`) → how many."""

    def __post_init__(self) -> None:
        accounted = self.trained + sum(self.masked.values()) + sum(self.dropped.values())
        if accounted != self.sampled or min(self.dropped.values(), default=1) < 1:
            raise ValueError(f"call {self.call_id}: {self.sampled} tokens sampled but {accounted} accounted for")


class Spelled(msgspec.Struct, frozen=True, kw_only=True):
    """Text of a request that spells an added token of the model. It was rendered as the text that it is."""

    token: str
    call_id: str
    """The first call that holds it."""
    where: str


class AttemptAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt, audited."""

    attempt_id: str
    totals: Totals
    """As recorded; what contradicts them is among the findings."""
    calls: tuple[CallAccount, ...]
    rows: int
    row_tokens: int
    breaks: tuple[Break, ...]
    retries: int
    """Calls whose request is another call's, id by id and image by image."""
    off_policy: dict[str, int]
    """Why sampled tokens are not the policy's own → how many; any call that says so, trained or not."""
    warnings: dict[str, int]
    """What was left out or mended of requests → in how many calls. (Broken prefixes are among `breaks`.)"""
    findings: tuple[str, ...]
    """What must not be. Empty when all is well."""
    special_token_text: tuple[Spelled, ...] = ()
    """Each message once, by its first such token. Somebody may have tried to write turns into the prompt."""


def audit_attempt(trajectory: Trajectory, samples: SampleSet, *, added: Collection[str] = ()) -> AttemptAudit:
    """Check an attempt's samples against its calls. Nothing is raised: what is wrong is a finding.

    `added`: texts of the added tokens of the model's tokenizer; requests that spell one are reported.
    """
    calls = {call.call_id: call for call in trajectory.calls}
    findings = _findings(samples, calls, trajectory)
    accounts: list[CallAccount] = []
    why = dropped_calls(trajectory, predecessors(trajectory))
    for call in trajectory.calls:
        try:
            accounts.append(_call_account(call, samples.samples, why.get(call.call_id)))
        except ValueError as error:
            findings.append(str(error))
    found = Counter[str]()
    for account_of_call in accounts:
        found.update(account_of_call.dropped)
    if not findings and _merged(found) != _merged(samples.totals.dropped):
        findings.append(f"dropped by call {dict(found)}, but {samples.totals.dropped} in the attempt's account")
    return AttemptAudit(
        attempt_id=trajectory.attempt_id,
        totals=samples.totals,
        calls=tuple(accounts),
        rows=len(samples.samples),
        row_tokens=sum(len(sample.ids) for sample in samples.samples),
        breaks=tuple(find_breaks(trajectory)),
        retries=_retries(trajectory.calls),
        off_policy=_off_policy(trajectory.calls),
        warnings=_warnings(trajectory.calls),
        findings=tuple(findings),
        special_token_text=tuple(_spelled(trajectory.calls, added)),
    )


def _spelled(calls: Sequence[ModelCall], added: Collection[str]) -> Iterator[Spelled]:
    texts = sorted({text for text in added if text.strip()}, key=lambda text: (-len(text), text))
    if not texts:
        return
    pattern = re.compile("|".join(map(re.escape, texts)))
    seen: set[object] = set()
    for call in calls:
        # What an assistant says is the policy's, and its marks are read as structure when it is sampled.
        places: list[tuple[object, str, str]] = [
            (message, f"messages[{index}] ({message.role.value})", message.text)
            for index, message in enumerate(call.conversation.messages)
            if message.role is not Role.ASSISTANT
        ]
        tools = call.conversation.tools
        places.append((digest_tools(tools), "tools", msgspec.json.encode(tools).decode()))
        for what, where, text in places:
            if what in seen:
                continue
            seen.add(what)
            if found := pattern.search(text):
                yield Spelled(token=found.group(), call_id=call.call_id, where=where)


def _merged(dropped: Mapping[str, int]) -> Counter[str]:
    """A stop token in no row may be replaced in one row and too long in another: the two are told apart only in sum."""
    merged = Counter(dropped)
    merged["closing"] += merged.pop("too_long", 0)
    return +merged


def _warnings(calls: Sequence[ModelCall]) -> dict[str, int]:
    said = [warning for call in calls for warning in call.warnings if not warning.startswith(BROKEN)]
    return dict(sorted(Counter(said).items()))


def _findings(samples: SampleSet, calls: Mapping[str, ModelCall], trajectory: Trajectory) -> list[str]:
    found: list[str] = []
    for sample in samples.samples:
        try:
            check_exact(sample, calls)
        except ExactnessError as error:
            found.append(str(error))
    if len({sample.sample_id for sample in samples.samples}) != len(samples.samples):
        found.append("two samples have the same id")
    try:
        totals = account(samples.samples, trajectory.calls, samples.totals.dropped)
    except ExactnessError as error:
        return [*found, str(error)]
    if totals != samples.totals:
        found.append(f"the recorded account {_said(samples.totals)} is not what the samples say: {_said(totals)}")
    return found


def _call_account(call: ModelCall, samples: Sequence[Sample], dropped: str | None) -> CallAccount:
    """`dropped`: why none of the call's tokens are in a row of their own. What else is in no row is a stop token that
    the template's own closing replaced, or was too long."""
    trained = 0
    masked: Counter[str] = Counter()
    for span in (span for sample in samples for span in sample.spans if span.call_id == call.call_id):
        if span.reason is None:
            trained += span.stop - span.start
        else:
            masked[span.reason] += span.stop - span.start
    left = len(call.sampled_ids) - trained - masked.total()
    reason = dropped or ("closing" if left == 1 and trained + masked.total() else "too_long")
    return CallAccount(
        call_id=call.call_id,
        thread=call.thread,
        role=call.role,
        status=call.status.value,
        sampled=len(call.sampled_ids),
        trained=trained,
        masked=dict(sorted(masked.items())),
        dropped={reason: left} if left else {},
    )


def _retries(calls: Sequence[ModelCall]) -> int:
    requests = Counter((call.thread, call.prompt.ids, call.prompt.images) for call in calls)
    return sum(count - 1 for count in requests.values())


def _off_policy(calls: Sequence[ModelCall]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for call in calls:
        if call.off_policy is not None:
            found[call.off_policy] += len(call.sampled_ids)
    return dict(sorted(found.items()))


def _said(totals: Totals) -> str:
    return f"(sampled {totals.sampled}, trained {totals.trained}, masked {totals.masked}, dropped {totals.dropped})"
