"""Any program as a harness: a user's own agent, or an attack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openforgerl.conversation import digest_json
from openforgerl.errors import ConfigError, InputError
from openforgerl.harnesses.evidence import crashed_or_caused, ending_before_exit_code
from openforgerl.harnesses.options import HarnessOptions
from openforgerl.types import Ending, Exit, HarnessContext, JsonValue, Layer, ModelCall, Plan

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class CommandHarness:
    """Runs `harness.command.argv` with the session's URL and key filled in."""

    name = "command"

    def __init__(self, options: HarnessOptions | None = None) -> None:
        self._command = (options or HarnessOptions()).command
        if not self._command.argv:
            raise ConfigError("harness.command.argv is empty; give the program to run and its arguments")
        for path in self._command.files:
            if not path.startswith("/"):
                raise ConfigError(f"harness.command.files: {path!r} must be an absolute path inside the sandbox")

    @property
    def dialect(self) -> str:
        """As the options say."""
        return self._command.dialect

    def layers(self) -> Sequence[Layer]:
        """None: the program is the sandbox's own or comes in `files`."""
        return ()

    def plan(self, context: HarnessContext) -> Plan:
        """The options with their braces filled in."""
        base_url = context.base_urls.get(self.dialect)
        if base_url is None:
            raise InputError(
                f"harness.command.dialect {self.dialect!r} is not served; served: {sorted(context.base_urls)}"
            )
        values = {
            "base_url": base_url,
            "key": context.key,
            "instruction": context.task.instruction,
            "workdir": context.workdir,
            "home": context.home,
            "model": context.model,
        }

        def fill(text: str, field: str) -> str:
            return text if self._command.literal else _fill(text, values, f"harness.command.{field}")

        command = self._command
        return Plan(
            argv=tuple(fill(text, "argv") for text in command.argv),
            files={path: fill(text, f"files[{path!r}]") for path, text in command.files.items()},
            env={
                "PATH": PATH,
                "HOME": context.home,
                **{name: fill(text, f"env.{name}") for name, text in command.env.items()},
            },
            stdin=fill(command.stdin, "stdin"),
            services=tuple(tuple(fill(text, "services") for text in argv) for argv in command.services),
        )

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        """Exit 0 = finished, even without a model call: a program need not be an agent."""
        early = ending_before_exit_code(exit, calls)
        if early is not None and (exit.code != 0 or calls):
            return early
        if exit.code != 0:
            return crashed_or_caused(exit, calls)
        return Ending(kind="finished", by_policy=True, evidence="exit 0")

    def report(self) -> Mapping[str, JsonValue]:
        """The unfilled command line and a digest of everything configured."""
        command = self._command
        configured: JsonValue = [
            list(command.argv),
            command.env,
            command.files,
            command.stdin,
            [list(argv) for argv in command.services],
        ]
        return {"name": self.name, "argv": list(command.argv), "digest": digest_json(configured)}


def _fill(text: str, values: Mapping[str, str], field: str) -> str:
    try:
        return text.format_map(values)
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"{field}: cannot fill in {text[:80]!r} ({type(error).__name__}: {error}); known are "
            f"{', '.join('{' + name + '}' for name in values)}; write {{{{ and }}}} for braces, or set "
            "harness.command.literal = true"
        ) from error
