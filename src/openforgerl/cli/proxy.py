"""`openforgerl proxy`: serve an engine to harnesses and record every call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import msgspec

from openforgerl.cli.configs import ENGINE_HELP
from openforgerl.cli.interruption import run_until_interrupted
from openforgerl.cli.models import chosen_words, open_renderer
from openforgerl.config import load_config
from openforgerl.engines.opening import engine_options, open_engine
from openforgerl.engines.options import EngineOptions
from openforgerl.errors import ConfigError, Interrupted
from openforgerl.orchestrator.assembly import keep_tokenizer, listening, make_run_folder
from openforgerl.proxy import ProxyOptions, ProxyServer
from openforgerl.store import CallStore, Database


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sections that `-s` sets for this verb."""

    proxy: ProxyOptions = ProxyOptions()
    engine: EngineOptions = EngineOptions()


@click.command()
@click.option("--engine", "spec", required=True, metavar="SPEC", help=ENGINE_HELP)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory with tokenizer.json and chat template.  [default: the engine's, for torch:DIR]",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Data port, for agents.")
@click.option("--control-port", type=click.IntRange(0, 65535), default=8001, show_default=True, help="Ours.")
@click.option(
    "--control-token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Bearer token of the control port; made (0600) when missing.  [default: RUN/control-token]",
)
@click.option(
    "--run",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("runs/proxy"),
    show_default=True,
    help="Run folder.",
)
@click.option("-s", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="Set one value; may be repeated.")
def proxy(
    spec: str,
    tokenizer: Path | None,
    port: int,
    control_port: int,
    control_token_file: Path | None,
    folder: Path,
    settings: tuple[str, ...],
) -> None:
    """Serve an engine to harnesses and record every call, token-exactly.

    Open a session on the control port (POST /v1/sessions) and point a harness at the base URL and key it answers
    with. Everything is recorded in RUN/run.sqlite; the control port's /openapi.json describes the rest.
    """
    token_file = control_token_file or folder / "control-token"
    base = {"proxy": {"port": port, "control_port": control_port, "control_token_file": str(token_file)}}
    config = load_config(ProxyConfig, None, settings, base=base)
    chosen = engine_options(spec)
    if tokenizer is None and chosen.kind != "torch":
        raise ConfigError(f"engine {chosen.kind} has no tokenizer of its own: give --tokenizer DIR")
    make_run_folder(folder)
    try:
        run_until_interrupted(
            _serve(config, spec, tokenizer or Path(chosen.path), folder), "Sessions and calls are kept."
        )
    except Interrupted as stopped:
        click.echo(f"Stopped. {stopped}", err=True)


async def _serve(config: ProxyConfig, spec: str, tokenizer: Path, folder: Path) -> None:
    renderer = open_renderer(tokenizer, config.proxy)
    engine = open_engine(spec, renderer, config.engine)
    keep_tokenizer(folder, tokenizer)
    database = Database.open(folder / "run.sqlite")
    try:
        server = ProxyServer(engine=engine, renderer=renderer, store=CallStore(database), options=config.proxy)
        async with listening(server):
            host, port = server.data_address
            control_host, control_port = server.control_address
            click.echo(f"Data port     http://{host}:{port} (agents: POST /s/SESSION/v1/chat/completions)")
            click.echo(
                f"Control port  http://{control_host}:{control_port} (token in {config.proxy.control_token_file})"
            )
            click.echo(f"Model         {chosen_words(renderer, config.proxy)}")
            await asyncio.Event().wait()
    finally:
        await engine.close()
        await database.close()
