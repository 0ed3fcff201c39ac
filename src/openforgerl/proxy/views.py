"""What the control API shows of calls and samples, and takes for a new session. Its schema is built from this."""

from __future__ import annotations

import msgspec

from openforgerl.types import JsonValue, Limits, ModelCall, OpenedSession, PlacedImage, SampleSet, Sampling


class OpenSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/sessions`."""

    session_id: str | None = None
    """Yours, or a random one."""
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    metadata: dict[str, str] = {}
    template_kwargs: dict[str, JsonValue] = {}


class CallView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One recorded call."""

    call_id: str
    index: int
    dialect: str
    thread: str
    role: str
    role_evidence: str
    parent_call_id: str | None
    status: str
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str | None
    weights_version: int
    sampling_asked: dict[str, JsonValue]
    sampling_applied: Sampling
    off_policy: str | None
    request: JsonValue
    response: JsonValue
    error: str | None
    warnings: tuple[str, ...]
    images: tuple[PlacedImage, ...] = ()
    """Where images stand in `prompt_ids`; absent without any. Their bytes: `GET /v1/images/{sha256}`."""


class CallPage(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /v1/sessions/{id}/calls`."""

    calls: tuple[CallView, ...]
    next: int | None
    """Give this as `after` for the next page; null when there is none."""


class RecordPage(msgspec.Struct, frozen=True, kw_only=True):
    """The same with `form=record`: calls whole, as a trainer needs them."""

    calls: tuple[ModelCall, ...]
    next: int | None


class SpanView(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled ids inside a row."""

    start: int
    stop: int
    call_id: str
    offset: int
    state: str
    reason: str | None


class SampleView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One training row."""

    ids: tuple[int, ...]
    spans: tuple[SpanView, ...]
    logprobs: tuple[float, ...] | None
    source: str
    images: tuple[PlacedImage, ...] = ()
    """Where images stand in `ids`; absent without any."""


class TotalsView(msgspec.Struct, frozen=True, kw_only=True):
    """The account of sampled tokens."""

    sampled: int
    trained: int
    masked: dict[str, int]
    dropped: dict[str, int]


class SamplesView(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /v1/sessions/{id}/samples`."""

    samples: tuple[SampleView, ...]
    totals: TotalsView


class SealedSession(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `POST /v1/sessions/{id}/seal`."""

    session_id: str
    state: str = "sealed"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /healthz`."""

    status: str
    model: str
    weights_version: int
    sessions: int
    in_flight: int
    unlisted_fields: dict[str, int]
    """`dialect:field` → requests that carried it."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong, for programs (`code`, `param`) and for people."""

    code: str
    message: str
    param: str | None


class ErrorView(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer of the control API that is not 200."""

    error: ErrorDetail


BODIES = (OpenSession, OpenedSession, SealedSession, CallPage, RecordPage, SamplesView, Health, ErrorView)
"""Everything that goes over the control port, for its schema."""


def call_view(call: ModelCall) -> CallView:
    """A call as the control API shows it."""
    return CallView(
        call_id=call.call_id,
        index=call.index,
        dialect=call.dialect,
        thread=call.thread,
        role=call.role.value,
        role_evidence=call.role_evidence,
        parent_call_id=call.parent_call_id,
        status=call.status.value,
        prompt_ids=call.prompt.ids,
        sampled_ids=call.sampled_ids,
        logprobs=call.logprobs,
        finish_reason=None if call.finish_reason is None else call.finish_reason.value,
        weights_version=call.weights_version,
        sampling_asked=call.sampling_asked,
        sampling_applied=call.sampling_applied,
        off_policy=call.off_policy,
        request=call.request,
        response=call.response,
        error=call.error,
        warnings=call.warnings,
        images=call.prompt.images,
    )


def samples_view(samples: SampleSet) -> SamplesView:
    """Samples as the control API shows them."""
    rows = tuple(
        SampleView(
            ids=sample.ids,
            spans=tuple(
                SpanView(
                    start=span.start,
                    stop=span.stop,
                    call_id=span.call_id,
                    offset=span.offset,
                    state=span.state,
                    reason=span.reason,
                )
                for span in sample.spans
            ),
            logprobs=sample.logprobs,
            source=sample.source.value,
            images=sample.images,
        )
        for sample in samples.samples
    )
    totals = samples.totals
    return SamplesView(
        samples=rows,
        totals=TotalsView(sampled=totals.sampled, trained=totals.trained, masked=totals.masked, dropped=totals.dropped),
    )
