"""`show` names an image with its size; its placeholders would fill pages."""

from __future__ import annotations

import asyncio
import hashlib
import io
from pathlib import Path

import pytest
from PIL import Image as Pillow

from openforgerl.cli.main import main
from openforgerl.orchestrator.assembly import keep_tokenizer
from openforgerl.rendering import load_renderer
from openforgerl.store import CallStore, Database, RunStore
from openforgerl.testing.tiny_vl import write_tiny_vl
from openforgerl.trajectory import SamplePolicy, build, build_samples
from openforgerl.types import (
    Attempt,
    CallStatus,
    CallTiming,
    Conversation,
    Failure,
    FinishReason,
    Image,
    Message,
    ModelCall,
    Origin,
    Outcome,
    Role,
    Rollout,
    Source,
    Stage,
    Text,
    ThreadRole,
    Verdict,
)


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Pillow.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


WIDE, LOST = png(640, 480), png(64, 64)
NAMES = [hashlib.sha256(data).hexdigest() for data in (WIDE, LOST)]


async def record(folder: Path, model: Path, outcome: Outcome) -> None:
    """One attempt whose only call saw two images, of which the database has one."""
    renderer = load_renderer(model)
    parts = (Text("See "), Image(NAMES[0], "image/png"), Image(NAMES[1], "image/png"), Text("!"))
    asked = Conversation(messages=(Message(role=Role.USER, parts=parts),))
    images = dict(zip(NAMES, (WIDE, LOST), strict=True))
    call = ModelCall(
        call_id="c",
        session_id="r-a0",
        index=0,
        dialect="chat",
        thread="main",
        role=ThreadRole.MAIN,
        role_evidence="opens the session",
        parent_call_id=None,
        status=CallStatus.COMPLETE,
        conversation=asked,
        prompt=renderer.render(asked, restored={}, clock=0.0, kwargs={}, images=images),
        sampled_ids=renderer.encode("A box.<|im_end|>"),
        weights_version=0,
        finish_reason=FinishReason.STOP,
        answer=Message(role=Role.ASSISTANT, parts=(Text("A box."),)),
        timing=CallTiming(received=0.0),
    )
    rollout = Rollout(
        rollout_id="r",
        run_id="run",
        task="t",
        task_digest="d",
        harness="react",
        group_id="g",
        index=0,
        seed=0,
        purpose="train",
    )
    attempt = Attempt(attempt_id="r-a0", rollout_id="r", number=0, started_at=0.0)
    keep_tokenizer(folder, model)
    async with Database.open(folder / "run.sqlite") as database:
        store = RunStore(database)
        await store.put_run("run", "digest")
        await store.plan([rollout])
        await store.begin_attempt(attempt)
        await CallStore(database).put_images({NAMES[0]: WIDE})
        await store.import_calls("r-a0", [call])
        samples = build_samples(build("r-a0", [call]), rollout=rollout, source=Source.TEACHER, policy=SamplePolicy())
        done = Attempt(attempt_id="r-a0", rollout_id="r", number=0, started_at=0.0, finished_at=1.0, outcome=outcome)
        await store.commit(done, samples if isinstance(outcome, Verdict) else None)


@pytest.mark.parametrize(
    "outcome",
    [
        Verdict(reward=1.0, passed=True),
        Failure(stage=Stage.RUN, kind="crash", origin=Origin.HARNESS, message="gone", retryable=True),
    ],
    ids=["row", "call"],
)
def test_an_image_is_named(tmp_path: Path, outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    asyncio.run(record(folder, write_tiny_vl(tmp_path / "tiny-vl"), outcome))
    with pytest.raises(SystemExit) as left:
        main(["show", str(folder), "r-a0"])
    assert left.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "image_pad" not in said
    assert f"See <|vision_start|>⟨image 640x480 {NAMES[0][:12]}⟩<|vision_end|>" in said
    assert f"⟨image (missing or damaged) {NAMES[1][:12]}⟩<|vision_end|>!" in said
    assert "A box." in said
