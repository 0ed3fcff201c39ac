"""The in-house ReAct harness: `agent.py`, run by the sandbox's own Python."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.harnesses.evidence import crashed_or_caused, ending_before_exit_code, tail
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.types import Ending, Exit, HarnessContext, JsonValue, Layer, ModelCall, Plan

AGENT = Path(__file__).with_name("agent.py")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PYTHON = "/usr/bin/python3"
"""The sandbox's Python; 3.9 or later."""

_ENDINGS: dict[int, Ending] = {
    3: Ending(kind="limit", by_policy=True, evidence="turn limit"),
    5: Ending(kind="gave_up", by_policy=True, evidence="too many turns in a row without a well-formed call"),
    6: Ending(kind="limit", by_policy=True, evidence="context length"),
}


class ReactHarness:
    """Adapter; see `agent.py` for the exit codes."""

    name = "react"
    dialect = "chat"

    def __init__(self, options: HarnessOptions | None = None) -> None:
        self._options = (options or HarnessOptions()).react
        self._agent = AGENT.read_text(encoding="utf-8")

    def layers(self) -> Sequence[Layer]:
        """None: the sandbox's Python is enough."""
        return ()

    def plan(self, context: HarnessContext) -> Plan:
        """The agent's one file, its settings in the environment, the instruction on standard input."""
        base_url = context.base_urls.get(self.dialect)
        if base_url is None:
            raise InputError(f"react speaks {self.dialect!r}, which is not served; served: {sorted(context.base_urls)}")
        options = self._options
        agent = f"{context.home}/.react/agent.py"
        return Plan(
            argv=(PYTHON, "-I", "-B", agent),
            files={agent: self._agent},
            env={
                "PATH": PATH,
                "HOME": context.home,
                "LANG": "C.UTF-8",
                "REACT_BASE_URL": base_url,
                "REACT_KEY": context.key,
                "REACT_MODEL": context.model,
                "REACT_MAX_TOKENS": str(context.max_output_tokens),
                "REACT_SYSTEM_PROMPT": options.system_prompt,
                "REACT_MAX_TURNS": str(options.max_turns),
                "REACT_MAX_BAD_TURNS": str(options.max_bad_turns),
                "REACT_COMMAND_TIMEOUT": str(options.command_timeout),
                "REACT_OUTPUT_LIMIT": str(options.output_limit),
                "REACT_STREAM": "1" if options.stream else "0",
            },
            stdin=context.task.instruction,
        )

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """By the documented exit codes; anything else is a crash unless the calls show a limit of ours."""
        early = ending_before_exit_code(exit, calls)
        if early is not None:
            return early
        if exit.code == 0:
            return Ending(kind="finished", by_policy=True, evidence="exit 0")
        known = _ENDINGS.get(exit.code) if exit.code is not None else None
        if known is None:
            return crashed_or_caused(exit, calls)
        return Ending(kind=known.kind, by_policy=known.by_policy, evidence=f"{known.evidence}: {tail(exit)}")

    def report(self) -> Mapping[str, JsonValue]:
        """The digest of the agent's file."""
        digest = hashlib.sha256(self._agent.encode()).hexdigest()
        return {"name": self.name, "package_digest": digest, "user_agent": "openforgerl-react/1"}
