"""A run of a harness whose system prompt has a counter says so while it goes on, and when it is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openforgerl.cli.main import main
from openforgerl.testing.tiny_model import write_tiny_model

TASK = Path(__file__).parents[2] / "src/openforgerl/demo/tasks/rl-copy-00"
COUNTER = """
import json, urllib.request
messages = [dict(role="system", content=""), dict(role="user", content="Talk.")]
for turn in range(4):
    messages[0]["content"] = f"cch={{turn}}" + chr(10) + "Be good."
    body = json.dumps(dict(model="m", messages=messages)).encode()
    head = {{"authorization": "Bearer {key}", "content-type": "application/json"}}
    answer = json.load(urllib.request.urlopen(urllib.request.Request("{base_url}/chat/completions", body, head)))
    messages += [answer["choices"][0]["message"], dict(role="user", content="And?")]
"""

pytestmark = pytest.mark.sandbox


def ran(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    assert left.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize("scrub", [(), ("^cch=",)])
def test_breaks_are_said_counted_and_can_be_scrubbed(
    scrub: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    script, config = tmp_path / "script.json", tmp_path / "counter.toml"
    script.write_text(json.dumps({"answers": [{"text": "Yes.", "times": 0}]}))
    argv = f"[harness.command]\nargv = ['/usr/bin/python3', '-c', '''{COUNTER}''']\n"
    config.write_text(f"[proxy]\nscrub = {json.dumps(scrub)}\n{argv}")
    model, folder = write_tiny_model(tmp_path / "tiny"), tmp_path / "run"
    engine = ("--engine", f"scripted:{script}", "--tokenizer", model)
    ran(capsys, "run", TASK, *engine, "--harness", "command", "-s", "attempts=2", "--run", folder, "-c", config)
    shown, audited = ran(capsys, "show", folder), ran(capsys, "audit", folder)
    said = [record.getMessage() for record in caplog.records if record.name == "openforgerl.proxy.placing"]
    if scrub:
        assert said == []
        assert "prefixes broken" not in shown and "prefix broken" not in audited
        assert "rows 2 of" in audited and "warning in 8 calls: scrubbed: ^cch=" in audited
    else:
        assert len(said) == 1  # two attempts, three breaks in each, one line
        assert said[0].startswith("command (session run-0-rl-copy-00")
        assert "messages[0], marker_changed: 'cch=0\\nBe good.' became 'cch=1\\nBe good.'" in said[0]
        assert "prefixes broken: 6 marker_changed; `openforgerl audit` shows where" in shown
        assert "rows 8 of" in audited and "prefix broken, marker_changed: 6 times" in audited
