"""mini-swe-agent, unmodified, run as its users run it: one task, no confirmations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from openforgerl.conversation import parse_arguments
from openforgerl.harnesses.evidence import complete_calls, crashed_or_caused, ending_before_exit_code, tail
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.package import ARGUMENT_LIMIT, PATH, base_url
from openforgerl.harnesses.pip_package import InstalledPipPackage
from openforgerl.types import Ending, Exit, HarnessContext, JsonValue, Layer, ModelCall, Plan

FORMAT_ERRORS = 3
"""mini-swe-agent ends after so many answers in a row without a well-formed call (`max_consecutive_format_errors`)."""
LITELLM_USER_AGENT = "litellm/1.110.2"
"""Of its calls in `responses` and `messages`; in `chat` they go through OpenAI's library."""


class MiniSweAgentHarness:
    """Adapter. The installation is checked when its layers are first asked for, once per instance."""

    name = "mini-swe-agent"

    def __init__(self, options: HarnessOptions | None = None) -> None:
        options = options or HarnessOptions()
        self._options = options.mini_swe_agent
        self._package = InstalledPipPackage(self.name, options)

    @property
    def dialect(self) -> str:
        """As the options say."""
        return self._options.api

    def layers(self) -> Sequence[Layer]:
        """The installation, read-only. Raises `InputError` naming the install command when absent or changed."""
        return self._package.layers()

    def plan(self, context: HarnessContext) -> Plan:
        """`mini` with the task as an argument; a task too long for one goes into a file of settings."""
        url = base_url(context, self.name, self.dialect)
        package, options = self._package, self._options
        folder = f"{context.home}/.mswea"
        provider = "anthropic" if self.dialect == "messages" else "openai"
        settings: list[str] = []
        files: dict[str, str] = {}
        argv = [package.python(), package.script("mini"), "-m", f"{provider}/{context.model}"]
        if self.dialect == "responses":
            argv += ["--model-class", "litellm_response"]
        task = context.task.instruction
        if len(task.encode()) <= ARGUMENT_LIMIT:
            argv += [f"--task={task}"]  # one word: a task may start with a dash
        else:
            files[f"{folder}/task.yaml"] = msgspec.json.encode({"run": {"task": task}}).decode() + "\n"
            settings.append(f"{folder}/task.yaml")
        argv += ["-y", "--exit-immediately", "-l", "0", "-o", f"{folder}/trajectory.json"]
        if options.step_limit:
            settings.append(f"agent.step_limit={options.step_limit}")
        if options.command_timeout != 30:
            settings.append(f"environment.timeout={options.command_timeout}")
        if self.dialect == "messages":
            # litellm asks an Anthropic model that it does not know for 4096 tokens at most.
            settings.append(f"model.model_kwargs.max_tokens={context.max_output_tokens}")
        if settings:
            # The first -c replaces the default file. Its full path: a bare name is looked up in the work directory.
            for setting in (f"{package.inside}/site/minisweagent/config/mini.yaml", *settings):
                argv += ["-c", setting]
        variable = "ANTHROPIC" if self.dialect == "messages" else "OPENAI"
        return Plan(
            argv=(*argv, *options.extra_arguments),
            files=files,
            env={
                "PATH": PATH,
                "HOME": context.home,
                "LANG": "C.UTF-8",
                f"{variable}_API_KEY": context.key,
                f"{variable}_BASE_URL": url,
                "MSWEA_CONFIGURED": "true",
                "MSWEA_SILENT_STARTUP": "1",
                "MSWEA_COST_TRACKING": "ignore_errors",  # else a model without a price ends it
                "MSWEA_GLOBAL_CONFIG_DIR": folder,
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(options.attempts),
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else litellm fetches a price list at every start
            },
        )

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """It exits 0 after a submission, after three format errors in a row and at its step limit."""
        early = ending_before_exit_code(exit, calls)
        if early is not None:
            return early
        if exit.code != 0:
            return crashed_or_caused(exit, calls)
        answered = complete_calls(calls)
        if not answered:
            return Ending(kind="crashed", by_policy=False, evidence=f"exit 0 without a complete call: {tail(exit)}")
        errors = [format_error(call) for call in answered[-FORMAT_ERRORS:]]
        if len(errors) == FORMAT_ERRORS and all(errors):
            evidence = f"exit 0 after {FORMAT_ERRORS} answers in a row without a well-formed call, last: {errors[-1]}"
            return Ending(kind="gave_up", by_policy=True, evidence=evidence)
        limit = self._options.step_limit
        if errors[-1] is not None or (0 < limit <= len(answered) and not _submits(answered[-1])):
            return Ending(kind="limit", by_policy=True, evidence=f"exit 0 without a submission, step limit {limit}")
        return Ending(kind="finished", by_policy=True, evidence="exit 0 after a submission")

    def report(self) -> Mapping[str, JsonValue]:
        """Version, digests (checked against the pinned package digest) and Python's version."""
        report = dict(self._package.report())
        if self.dialect != "chat":
            report["user_agent"] = LITELLM_USER_AGENT
        return report


def format_error(call: ModelCall) -> str | None:
    """Why mini-swe-agent would drop this answer and ask again; None for a well-formed one.

    Its rule: at least one tool call, each named `bash` with a JSON object that has a `command`.
    """
    if call.answer is None or not call.answer.tool_calls:
        return "no tool call"
    for tool_call in call.answer.tool_calls:
        if tool_call.name != "bash":
            return f"unknown tool {tool_call.name!r}"
        arguments = parse_arguments(tool_call.arguments)
        if not isinstance(arguments, dict) or "command" not in arguments:
            return "arguments without a command"
    return None


def _submits(call: ModelCall) -> bool:
    """Whether a command's output may have been the submission: it starts with this word."""
    words = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    return call.answer is not None and any(words in tool_call.arguments for tool_call in call.answer.tool_calls)
