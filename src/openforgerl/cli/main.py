"""`openforgerl`: one verb a module, loaded only when used, so that `--help` and the proxy start without torch.

Exit codes: 0 done · 1 it ran and failed · 2 wrong input, option or config · 130 interrupted, work is saved.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Sequence

import click

from openforgerl import __version__, plugins
from openforgerl.errors import InputError, Interrupted, OpenForgeError

VERBS = {
    "demo": "Train a tiny model inside a real harness, end to end, on this machine.",
    "proxy": "Serve an engine to harnesses and record every call, token-exactly.",
    "run": "Run tasks in a harness and record the rollouts.",
    "eval": "Measure pass@1, pass@k and pass^k of a model on tasks.",
    "train": "SFT or GRPO on rollouts collected inside the harness.",
    "tasks": "List, show and check Harbor task directories.",
    "harness": "Install harnesses and list what is installed.",
    "images": "Build the images that containers and pods start from, and send them to a registry.",
    "show": "Show a run: its attempts, or one attempt's tokens.",
    "export": "Write a run's rollouts in another tool's format, and say what that format loses.",
    "audit": "Check that a run's samples are what was sampled, and that every token is accounted for.",
    "replay": "Run a rollout's harness again against its recorded answers, and say where its requests differ.",
    "reap": "Destroy what dead runs left: processes, containers, pods and their objects.",
    "doctor": "Say what this machine can do, and how to get what is missing.",
    "testing": "Small models and fakes for tests of your own.",
}
"""Verb → its line in `--help`. A test compares this with what each verb says of itself."""


WRONG_PATH = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.EROFS)
"""What is wrong when a path that somebody gave cannot be used; anything else (a full disk) is failed work."""


class Verbs(click.Group):
    """A group whose commands are imported when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = plugins.load("verb", cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="openforgerl")
@click.option("-v", "--verbose", count=True, help="More of the log on standard error (-vv: everything).")
def cli(verbose: int) -> None:
    """Train language-model agents inside the real harness they ship in.

    New here: `openforgerl demo` trains a tiny model inside pi and reports. Then `openforgerl doctor`.
    """
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    """Console entry point: errors become one clear line and an exit code."""
    try:
        code = cli.main(args=None if argv is None else list(argv), prog_name="openforgerl", standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except (click.ClickException, click.Abort, KeyboardInterrupt, OpenForgeError, OSError, ExceptionGroup) as error:
        sys.exit(_complain(error))
    sys.exit(code if isinstance(code, int) else 0)


def _complain(error: BaseException) -> int:
    """Say in one line what went wrong; the exit code. Errors that are bugs of ours go on, with their traceback."""
    first = error
    while isinstance(first, ExceptionGroup):  # a task group's: its first error is the cause, the others follow from it
        first = first.exceptions[0]
    match first:
        case click.exceptions.NoArgsIsHelpError():
            first.show()
            return 2
        case click.ClickException():
            path = first.ctx.command_path if isinstance(first, click.UsageError) and first.ctx else "openforgerl"
            click.echo(f"Error: {first.format_message()} (see {path} --help)", err=True)
            return 2
        case Interrupted() | KeyboardInterrupt() | click.Abort():
            click.echo(f"Interrupted. {first}".rstrip(), err=True)
            return 130
        case InputError():
            click.echo(f"Error: {first}", err=True)
            return 2
        case OpenForgeError():
            click.echo(f"Error: {type(first).__name__}: {first}", err=True)
            return 1
        case OSError(filename=str() as name):
            click.echo(f"Error: {name}: {first.strerror}", err=True)
            return 2 if first.errno in WRONG_PATH else 1
        case OSError():
            click.echo(f"Error: {first}", err=True)
            return 1
        case _:
            raise error
