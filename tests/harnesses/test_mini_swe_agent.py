"""mini-swe-agent as a plan, what its exit means, and the real one in a sandbox against the real proxy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openforgerl.errors import InputError
from openforgerl.harnesses import observed_user_agents
from openforgerl.harnesses.mini_swe_agent import MiniSweAgentHarness
from openforgerl.harnesses.mini_swe_agent_options import MiniSweAgentOptions
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.testing.tiny_model import write_tiny_model
from openforgerl.types import CallStatus, Exit, FinishReason, HarnessContext, ModelCall

from .real_agents import Ran, cached, run_agent, tool

MakeContext = Callable[..., HarnessContext]
MakeCall = Callable[..., ModelCall]
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
URLS = {
    "chat": "http://127.0.0.1:8080/s/a/v1",
    "responses": "http://127.0.0.1:8080/s/a/v1",
    "messages": "http://127.0.0.1:8080/s/a",
}


def mini(**options: Any) -> MiniSweAgentHarness:
    return MiniSweAgentHarness(HarnessOptions(cache="/c", mini_swe_agent=MiniSweAgentOptions(**options)))


def test_the_plan_is_what_was_measured(make_context: MakeContext) -> None:
    plan = mini().plan(make_context(base_urls=URLS))
    assert plan.argv == (
        "/opt/mini-swe-agent/bin/python3",
        "/opt/mini-swe-agent/site/bin/mini",
        *("-m", "openai/policy"),
        "--task=Copy a.txt to b.txt.",
        *("-y", "--exit-immediately", "-l", "0", "-o", "/home/agent/.mswea/trajectory.json"),
    )
    assert plan.env == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/home/agent",
        "LANG": "C.UTF-8",
        "OPENAI_API_KEY": "the-key",
        "OPENAI_BASE_URL": "http://127.0.0.1:8080/s/a/v1",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": "/home/agent/.mswea",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "5",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    assert (plan.files, plan.stdin, plan.services) == ({}, "", ())


def test_options_become_settings_on_top_of_its_own_file(make_context: MakeContext) -> None:
    harness = mini(step_limit=7, command_timeout=90, attempts=2, extra_arguments=("--x",))
    plan = harness.plan(make_context(base_urls=URLS))
    assert plan.argv[-7:] == (
        *("-c", "/opt/mini-swe-agent/site/minisweagent/config/mini.yaml"),
        *("-c", "agent.step_limit=7"),
        *("-c", "environment.timeout=90"),
        "--x",
    )
    assert plan.env["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] == "2"


def test_the_other_protocols(make_context: MakeContext) -> None:
    harness = mini(api="responses")
    plan = harness.plan(make_context(base_urls=URLS))
    assert harness.dialect == "responses"
    assert plan.argv[2:6] == ("-m", "openai/policy", "--model-class", "litellm_response")
    assert plan.env["OPENAI_BASE_URL"] == "http://127.0.0.1:8080/s/a/v1"
    harness = mini(api="messages")
    plan = harness.plan(make_context(base_urls=URLS))
    assert harness.dialect == "messages"
    assert plan.argv[2:4] == ("-m", "anthropic/policy")
    assert plan.argv[-2:] == ("-c", "model.model_kwargs.max_tokens=512")
    assert plan.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080/s/a"
    assert plan.env["ANTHROPIC_API_KEY"] == "the-key"
    assert "OPENAI_API_KEY" not in plan.env


def test_a_task_too_long_for_an_argument_goes_into_a_file(make_context: MakeContext) -> None:
    long = 'a "quoted": task\n' * 7000
    plan = mini().plan(make_context(base_urls=URLS, instruction=long))
    path = "/home/agent/.mswea/task.yaml"
    assert json.loads(plan.files[path]) == {"run": {"task": long}}
    assert plan.argv[-2:] == ("-c", path)
    assert not any(long in word for word in plan.argv)


def test_bad_options_and_absences_are_named(tmp_path: Path, make_context: MakeContext) -> None:
    with pytest.raises(ValueError, match=r"harness\.mini_swe_agent\.attempts must be 1 or more; got 0"):
        MiniSweAgentOptions(attempts=0)
    with pytest.raises(InputError, match=r"mini-swe-agent speaks 'messages'.*served: \['chat'\]"):
        mini(api="messages").plan(make_context(base_urls={"chat": "x"}))
    with pytest.raises(InputError, match="run: openforgerl harness install mini-swe-agent"):
        MiniSweAgentHarness(HarnessOptions(cache=str(tmp_path))).layers()


class TestEnding:
    """Exit 0 says nothing; the last answers do."""

    def run(self, code: int, *calls: ModelCall, **options: Any) -> tuple[str, bool]:
        ending = mini(**options).ending(Exit(code=code, stderr=b"said"), calls)
        return ending.kind, ending.by_policy

    def test_a_submission(self, make_call: MakeCall) -> None:
        submit = make_call(("bash", json.dumps({"command": SUBMIT})))
        assert self.run(0, make_call(text="bad"), make_call(text="bad"), submit) == ("finished", True)
        assert self.run(0, submit, step_limit=1) == ("finished", True)

    @pytest.mark.parametrize(
        "bad",
        [(), (("bash", "{"),), (("bash", "[]"),), (("bash", "{}"),), (("python", '{"command": "ls"}'),)],
    )
    def test_three_format_errors_in_a_row(self, make_call: MakeCall, bad: Any) -> None:
        good = make_call(("bash", '{"command": "ls"}'))
        assert self.run(0, good, make_call(*bad), make_call(*bad), make_call(*bad)) == ("gave_up", True)

    def test_its_own_step_limit(self, make_call: MakeCall) -> None:
        good = make_call(("bash", '{"command": "ls"}'))
        assert self.run(0, good, good, step_limit=2) == ("limit", True)
        assert self.run(0, good, make_call(text="bad"), step_limit=2) == ("limit", True)

    def test_what_is_not_the_policys_doing(self, make_call: MakeCall) -> None:
        assert self.run(0) == ("crashed", False)
        good = make_call(("bash", '{"command": "ls"}'))
        refused = make_call(status=CallStatus.ERROR, answer=None, error="overloaded: busy")
        assert self.run(1, good, refused) == ("crashed", False)

    def test_an_answer_cut_at_its_length_that_ends_it(self, make_call: MakeCall) -> None:
        assert self.run(1, make_call(finish_reason=FinishReason.LENGTH)) == ("limit", True)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return load_renderer(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.timeout(900)
class TestReal:
    """The installed package; about ten seconds of processor time a run."""

    @pytest.fixture
    def harness(self, harness_cache: Path) -> MiniSweAgentHarness:
        return MiniSweAgentHarness(HarnessOptions(cache=cached(harness_cache, "mini-swe-agent")))

    async def test_a_task(self, harness: MiniSweAgentHarness, tmp_path: Path, renderer: ChatRenderer) -> None:
        ran = await run_agent(
            tmp_path,
            renderer,
            harness,
            tool("bash", command="cp a.txt b.txt; python3 -c 'import litellm' 2>/dev/null || echo clean; pwd"),
            tool("bash", command="cat b.txt"),
            tool("bash", command=SUBMIT),
        )
        assert (ran.exit.code, ran.ending.kind, ran.ending.by_policy) == (0, "finished", True), ran.said
        assert ran.files["/workspace/b.txt"] == b"hello\n"
        assert observed_user_agents(ran.calls) == ("OpenAI/Python 3.57.0",)
        # The agent's own Python sees none of the harness's packages.
        first = json.loads(ran.calls[1].conversation.messages[-1].text)
        assert first == {"returncode": 0, "output": "clean\n/workspace\n"}
        one_thread_all_trained(ran, calls=3)
        report = harness.report()
        assert (report["version"], report["python_version"]) == ("2.4.6", "3.11")

    @pytest.mark.parametrize("api", ["responses", "messages"])
    async def test_the_other_protocols(
        self, harness_cache: Path, tmp_path: Path, renderer: ChatRenderer, api: Any
    ) -> None:
        options = MiniSweAgentOptions(api=api, attempts=1)
        harness = MiniSweAgentHarness(
            HarnessOptions(cache=cached(harness_cache, "mini-swe-agent"), mini_swe_agent=options)
        )
        ran = await run_agent(
            tmp_path, renderer, harness, tool("bash", command="cp a.txt b.txt"), tool("bash", command=SUBMIT)
        )
        assert (ran.exit.code, ran.ending.kind, ran.ending.by_policy) == (0, "finished", True), ran.said
        assert ran.files["/workspace/b.txt"] == b"hello\n"
        assert {call.dialect for call in ran.calls} == {api}
        assert observed_user_agents(ran.calls) == (harness.report()["user_agent"],) == ("litellm/1.110.2",)
        one_thread_all_trained(ran, calls=2)

    async def test_answers_that_are_no_calls(
        self, harness: MiniSweAgentHarness, tmp_path: Path, renderer: ChatRenderer
    ) -> None:
        ran = await run_agent(tmp_path, renderer, harness, {"text": "Hm."}, {"text": "Well."}, {"text": "No."})
        assert (ran.exit.code, ran.ending.kind, ran.ending.by_policy) == (0, "gave_up", True), ran.said
        # It drops such an answer and asks again: no answer of it stands in a later prompt.
        assert [message.role for message in ran.calls[2].conversation.messages] == ["system", "user", "user", "user"]


def one_thread_all_trained(ran: Ran, *, calls: int) -> None:
    assert len(ran.calls) == calls
    assert {(call.thread, call.role) for call in ran.calls} == {(ran.calls[0].thread, "main")}
    sampled = sum(len(call.sampled_ids) for call in ran.calls)
    totals = ran.samples["totals"]
    assert (totals["sampled"], totals["trained"], totals["dropped"]) == (sampled, sampled, {})
