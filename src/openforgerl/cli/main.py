"""`openforgerl`: one verb a module, loaded only when used, so that `--help` and the proxy start without torch.

Exit codes: 0 done · 1 it ran and failed · 2 wrong input, option or config · 130 interrupted, work is saved.
"""

from __future__ import annotations

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
    "show": "Show a run: its attempts, or one attempt's tokens.",
    "doctor": "Say what this machine can do, and how to get what is missing.",
    "testing": "Small models and fakes for tests of your own.",
}
"""Verb → its line in `--help`. A test compares this with what each verb says of itself."""


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
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (Interrupted, KeyboardInterrupt, click.Abort) as error:
        click.echo(f"Interrupted. {error}".rstrip(), err=True)
        sys.exit(130)
    except InputError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except OpenForgeError as error:
        click.echo(f"Error: {type(error).__name__}: {error}", err=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
