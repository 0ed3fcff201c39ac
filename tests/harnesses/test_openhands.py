"""OpenHands as a plan, its driver against a stand-in of the SDK's API, and what happens without its Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import InputError
from openforgerl.harnesses.openhands import OpenhandsHarness
from openforgerl.harnesses.openhands_driver import DRIVER
from openforgerl.harnesses.openhands_options import OpenhandsOptions
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.pip_installation import PIP_RECIPES, find_python
from openforgerl.types import Exit, HarnessContext, ModelCall

MakeContext = Callable[..., HarnessContext]
MakeCall = Callable[..., ModelCall]


def openhands(**options: Any) -> OpenhandsHarness:
    return OpenhandsHarness(HarnessOptions(cache="/c", openhands=OpenhandsOptions(**options)))


def test_the_plan(make_context: MakeContext) -> None:
    plan = openhands(max_iterations=9).plan(make_context(base_urls={"chat": "http://h/s/v1"}))
    assert plan.argv == ("/opt/openhands/bin/python3", "/home/agent/.openhands/driver.py")
    assert plan.files == {"/home/agent/.openhands/driver.py": DRIVER}
    assert plan.env["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert json.loads(plan.stdin) == {
        "llm": {
            "model": "openai/policy",
            "base_url": "http://h/s/v1",
            "api_key": "the-key",
            "usage_id": "agent",
            "timeout": 1800,
            "max_input_tokens": 4096,
            "max_output_tokens": 512,
            "disable_vision": True,
        },
        "tools": ["terminal", "file_editor"],
        "workspace": "/workspace",
        "max_iterations": 9,
        "task": "Copy a.txt to b.txt.",
    }


def test_where_there_is_no_python_for_it(tmp_path: Path) -> None:
    old = tmp_path / "python3"  # not below /usr: a sandbox would not see it
    old.symlink_to(sys.executable)
    with pytest.raises(InputError, match=r"needs Python 3\.12 or later in a system folder.*: none found; install one"):
        find_python(PIP_RECIPES["openhands"], (str(old),))
    if sys.version_info < (3, 12):
        with pytest.raises(InputError, match=r"needs Python 3\.12 or later.*/usr/bin/python3 is 3\.11"):
            find_python(PIP_RECIPES["openhands"], ("/usr/bin/python3",))


SDK = """
import enum, types
class Tool:
    def __init__(self, name): self.name = name
class LLM:
    def __init__(self, **fields): self.fields = fields
class Agent:
    def __init__(self, llm, tools): self.llm, self.tools = llm, tools
class Status(enum.Enum):
    FINISHED = "finished"
class Conversation:
    def __init__(self, **fields):
        self.fields = fields
        self.state = types.SimpleNamespace(events=[types.SimpleNamespace(code="Old")], execution_status=Status.FINISHED)
    def send_message(self, text): self.text = text
    def run(self):
        agent = self.fields.pop("agent")
        import sys
        print(self.text, self.fields, [t.name for t in agent.tools], agent.llm.fields, file=sys.stderr)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """The few names of the SDK that the driver uses, as the SDK 1.58.2 has them."""
    files = {
        "pydantic.py": "class SecretStr(str): pass\n",
        "openhands/sdk/__init__.py": SDK,
        "openhands/sdk/conversation/__init__.py": "",
        "openhands/sdk/conversation/response_utils.py": "def get_agent_final_response(events): return 'Done.'\n",
        "openhands/tools/terminal.py": "class TerminalTool: name = 'terminal'\n",
        "openhands/tools/file_editor.py": "class FileEditorTool: name = 'file_editor'\n",
        "openhands/tools/task_tracker.py": "class TaskTrackerTool: name = 'task_tracker'\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "driver.py").write_text(DRIVER)
    return tmp_path


def test_the_driver(stand_in: Path, make_context: MakeContext, make_call: MakeCall) -> None:
    harness = openhands(tools=("terminal", "task_tracker"))
    plan = harness.plan(make_context(base_urls={"chat": "http://h/s/v1"}))
    done = subprocess.run(
        [sys.executable, str(stand_in / "driver.py")], input=plan.stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"status": "finished", "code": "Old", "final": "Done."}
    assert done.stderr.startswith("Copy a.txt to b.txt. {'workspace': '/workspace', 'max_iteration_per_run': 500")
    assert "['terminal', 'task_tracker']" in done.stderr
    ending = harness.ending(Exit(code=0, stdout=done.stdout.encode()), [make_call()])
    assert (ending.kind, ending.by_policy) == ("finished", True)


@pytest.mark.parametrize(
    ("said", "code", "expected"),
    [
        ({"status": "error", "code": "MaxIterationsReached", "final": ""}, 0, ("limit", True)),
        ({"status": "stuck", "code": "", "final": ""}, 0, ("gave_up", True)),
        ({"status": "error", "code": "Other", "final": ""}, 0, ("crashed", False)),
        (None, 1, ("crashed", False)),
    ],
)
def test_other_endings(make_call: MakeCall, said: Any, code: int, expected: tuple[str, bool]) -> None:
    text = b"noise\n" + (json.dumps(said).encode() if said else b"")
    ending = openhands().ending(Exit(code=code, stdout=text), [make_call()])
    assert (ending.kind, ending.by_policy) == expected


def test_bad_options() -> None:
    with pytest.raises(ValueError, match=r"harness\.openhands\.max_iterations must be 1 or more; got 0"):
        OpenhandsOptions(max_iterations=0)
