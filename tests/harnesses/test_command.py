"""Any program as a harness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from openforgerl.errors import ConfigError, InputError
from openforgerl.harnesses import CommandOptions, HarnessOptions
from openforgerl.harnesses.command import CommandHarness
from openforgerl.types import HarnessContext

MakeContext = Callable[..., HarnessContext]


def harness(**options: Any) -> CommandHarness:
    return CommandHarness(HarnessOptions(command=CommandOptions(**options)))


def test_everything_is_filled_in(make_context: MakeContext) -> None:
    context = make_context(base_urls={"chat": "http://h/v1"}, instruction="say {hi}")
    plan = harness(
        argv=("agent", "--url={base_url}", "{instruction}"),
        env={"KEY": "{key}", "PATH": "/mine"},
        files={"/etc/agent.json": '{{"model": "{model}", "dir": "{workdir}", "home": "{home}"}}'},
        stdin="{instruction}\n",
        services=(("gateway", "{key}"),),
    ).plan(context)
    assert plan.argv == ("agent", "--url=http://h/v1", "say {hi}")
    assert plan.env == {"PATH": "/mine", "HOME": "/home/agent", "KEY": "the-key"}
    assert plan.files == {"/etc/agent.json": '{"model": "policy", "dir": "/workspace", "home": "/home/agent"}'}
    assert plan.stdin == "say {hi}\n"
    assert plan.services == (("gateway", "the-key"),)


def test_literal_text_is_left_alone(make_context: MakeContext) -> None:
    plan = harness(argv=("sh", "-c", "for f in {a,b}; do echo ${f}; done"), literal=True).plan(make_context())
    assert plan.argv[2] == "for f in {a,b}; do echo ${f}; done"


@pytest.mark.parametrize("text", ["{nope}", "{", "{0}", "{key.nope}", "{}"])
def test_a_wrong_brace_is_named(make_context: MakeContext, text: str) -> None:
    with pytest.raises(ConfigError, match=r"harness\.command\.argv: cannot fill in .*\{base_url\}"):
        harness(argv=("x", text)).plan(make_context())


def test_wrong_options_are_named(make_context: MakeContext) -> None:
    with pytest.raises(ConfigError, match=r"harness\.command\.argv is empty"):
        harness()
    with pytest.raises(ConfigError, match="absolute path"):
        harness(argv=("x",), files={"relative": ""})
    with pytest.raises(InputError, match="'gemini' is not served; served: \\['chat'\\]"):
        harness(argv=("x",), dialect="gemini").plan(make_context())
    with pytest.raises(msgspec.ValidationError, match="argvs"):
        msgspec.convert({"command": {"argvs": ["x"]}}, HarnessOptions)


def test_the_report_tells_programs_apart() -> None:
    one, two = harness(argv=("a",)), harness(argv=("a",), files={"/x": "y"})
    assert one.report()["argv"] == ["a"]
    assert one.report()["digest"] != two.report()["digest"]
    assert one.report() == harness(argv=("a",)).report()
