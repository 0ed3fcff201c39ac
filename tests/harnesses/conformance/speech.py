"""How each harness's tools are called: the same deeds, in the words of the tools that it offers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Speech:
    """One harness's words."""

    shell: str
    """Name of the tool that runs a command."""
    command: str = "command"
    """The argument that holds the command."""
    more: Json = field(default_factory=dict)
    """Further arguments that the shell tool wants."""
    delegate: str | None = None
    """Name of the tool that starts a sub-agent, as the model is offered it."""
    charge: str = "prompt"
    """The argument that holds the sub-agent's task."""
    delegate_more: Json = field(default_factory=dict)
    waits: bool = True
    """Whether starting a sub-agent waits for its end."""
    report: Json | None = None
    """The call that ends a sub-agent, where a last word does not."""
    look: str | None = None
    """Name of the tool that reads a picture."""
    picture: str = "path"
    """The argument that holds the picture's path."""
    submit: str | None = None
    """The command that ends the run, where a last word does not."""

    def run(self, command: str) -> Json:
        """A call that runs `command`."""
        return {"name": self.shell, "arguments": {self.command: command, **self.more}}

    def hand_back(self, text: str) -> Json:
        """The answer that ends a sub-agent."""
        return {"text": text, "tool_calls": [self.report]} if self.report else {"text": text}

    def look_at(self, path: str) -> Json:
        """A call that looks at the picture at `path`."""
        assert self.look is not None
        return {"name": self.look, "arguments": {self.picture: path}}

    def broken(self) -> Json:
        """An answer whose call has arguments that are no JSON: the closing is missing."""
        text = f'{{"name": "{self.shell}", "arguments": {{"{self.command}": "cp a.txt'
        return {"raw": f"<tool_call>\n{text}\n</tool_call>"}

    def hand_over(self, task: str) -> Json:
        """A call that starts a sub-agent on `task`."""
        assert self.delegate is not None
        return {"name": self.delegate, "arguments": {self.charge: task, **self.delegate_more}}

    def end(self, text: str = "Done.") -> Json:
        """The answer that ends the run."""
        return {"text": text, "tool_calls": [self.run(self.submit)]} if self.submit else {"text": text}


SPEECH: dict[str, Speech] = {
    "pi": Speech(shell="bash", look="read"),
    "codex": Speech(
        shell="exec_command",
        command="cmd",
        more={"yield_time_ms": 60_000},
        delegate="multi_agent_v1__spawn_agent",
        charge="message",
        waits=False,
        look="view_image",
    ),
    "claude-code": Speech(
        shell="Bash",
        more={"description": "Run a command"},
        delegate="Agent",
        delegate_more={"description": "Copy", "subagent_type": "general-purpose", "run_in_background": False},
        look="Read",
        picture="file_path",
    ),
    "opencode": Speech(
        shell="bash",
        more={"description": "Run a command"},
        delegate="task",
        delegate_more={"description": "Copy", "subagent_type": "general"},
        look="read",
        picture="filePath",
    ),
    "qwen-code": Speech(
        shell="run_shell_command",
        more={"is_background": False},
        delegate="agent",
        delegate_more={"description": "Copy", "subagent_type": "general-purpose", "run_in_background": False},
        look="read_file",
        picture="file_path",
    ),
    "gemini-cli": Speech(
        shell="run_shell_command",
        delegate="invoke_agent",
        delegate_more={"agent_name": "generalist"},
        report={"name": "complete_task", "arguments": {"result": {"response": "It is copied."}}},
        look="read_file",
        picture="file_path",
    ),
    "mini-swe-agent": Speech(shell="bash", submit="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    "openclaw": Speech(shell="exec", look="read"),
}
"""In the order of what a run costs, cheap ones first."""
