"""`python -m openforgerl.cli.reference > docs/cli.md`: every verb and flag, from the commands themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from openforgerl.cli.main import VERBS, cli

HEAD = """# The command line

Made by `python -m openforgerl.cli.reference > docs/cli.md`; a test compares. `openforgerl VERB --help` says the same.

Exit codes: 0 done; 1 it ran and failed; 2 wrong input, option or config; 130 interrupted, work is saved.

`-s SECTION.KEY=VALUE` sets any key that `--dry-run` prints, `--config FILE.toml` many of them; flags win over the file,
`-s` over both.
"""


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with its words: `("train sft", ...)`. Imports all verbs."""
    context = click.Context(cli, info_name="openforgerl")
    for verb in VERBS:
        command = cli.get_command(context, verb)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                if inner is not None:
                    yield f"{verb} {name}", inner
        elif command is not None:
            yield verb, command


def reference() -> str:
    """The whole of docs/cli.md."""
    return "\n".join([HEAD, *(_section(words, command) for words, command in commands())])


def _section(words: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"openforgerl {words}")
    lines = [
        f"## {words}",
        "",
        "```",
        " ".join([f"openforgerl {words}", *command.collect_usage_pieces(context)]),
        "```",
    ]
    lines += ["", inspect.cleandoc(command.help or ""), ""]
    rows: list[tuple[str, str]] = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and isinstance(parameter, click.Option) and "--help" not in parameter.opts:
            rows.append((record[0], " ".join(record[1].split())))
    if rows:
        lines += ["| flag | what it does |", "| --- | --- |"]
        lines += [
            f"| `{flag.replace('|', chr(92) + '|')}` | {text.replace('|', chr(92) + '|')} |" for flag, text in rows
        ]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    click.echo(reference(), nl=False)
