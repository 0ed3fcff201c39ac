"""Starts veRL in its own processes, or shows what would be started. Imports nothing of veRL itself."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from openforgerl.config import choose_tasks
from openforgerl.errors import ConfigError, InputError, TrainingError
from openforgerl.formats import Report, Selection, open_writer
from openforgerl.orchestrator.assembly import check_rooms, open_run, read_run
from openforgerl.store import RunStore
from openforgerl.training.configs import GrpoConfig, SftConfig
from openforgerl.training.verl.command import (
    MODULE,
    SFT_MODULE,
    Overrides,
    arguments,
    environment,
    grpo_overrides,
    sft_overrides,
)
from openforgerl.training.verl.runs import CHECKPOINTS

ROWS = "rows.parquet"
"""What SFT trains on, in its output folder."""
_GRACE_SECONDS = 60.0
"""How long veRL may take to end when it is interrupted."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command, the variables that it needs besides ours, and the name of veRL's config that it fills."""

    argv: tuple[str, ...]
    variables: dict[str, str]
    schema: str

    @property
    def shell(self) -> str:
        """One line to paste into a shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*words, "python", *map(shlex.quote, self.argv)])

    def resolved(self) -> str:
        """veRL's whole config as YAML, as veRL resolves and checks it. ConfigError with what veRL says is wrong."""
        _need_verl()
        overrides = [word for word in self.argv if "=" in word and not word.startswith(("-", "hydra."))]
        done = subprocess.run(
            [sys.executable, "-m", "openforgerl.training.verl.resolving", self.schema, *overrides],
            env=os.environ | self.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = " ".join((done.stdout.strip() or done.stderr.strip()[-1000:]).split())
            raise ConfigError(f"veRL refuses this config: {said}")
        return done.stdout

    def run(self) -> None:
        """Run it to its end. TrainingError when it fails; an interruption is passed on and waited for."""
        _need_verl()
        process = subprocess.Popen([sys.executable, *self.argv], env=os.environ | self.variables)
        try:
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
            process.kill()
            process.wait()
            raise
        if code:
            raise TrainingError(f"veRL ended with {code}; what it said is above. The same command resumes")


def grpo_launch(config: GrpoConfig, folder: Path) -> Launch:
    """The command of a GRPO run in `folder`."""
    overrides = grpo_overrides(config, folder, tasks=len(choose_tasks(config)))
    return _launch(["-m", MODULE], overrides, folder, "ppo_trainer")


async def prepare_grpo(config: GrpoConfig, folder: Path) -> None:
    """Everything is here and the run folder holds this config, for veRL's processes to read."""
    check_rooms(config)
    async with open_run(folder, config):
        return


def last_checkpoint(folder: Path) -> Path:
    """veRL's newest checkpoint of a run. TrainingError when there is none."""
    root = folder / CHECKPOINTS
    try:
        step = int((root / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError) as error:
        raise TrainingError(f"{root} holds no checkpoint of veRL's ({error})") from error
    return root / f"global_step_{step}"


def sft_launch(config: SftConfig, out: Path, model: Path) -> Launch:
    """The command of an SFT run on `out/rows.parquet`; one process for each GPU of this machine that veRL is to use."""
    overrides = sft_overrides(config, out / ROWS, out, model)
    processes = overrides.get("trainer.n_gpus_per_node", 1)
    runner = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", SFT_MODULE]
    return _launch(runner, overrides, out, "sft_trainer_engine")


async def write_rows(runs: Sequence[Path], out: Path) -> Report:
    """The solved attempts of run folders as `out/rows.parquet`; an earlier file is replaced. InputError when none."""
    out.mkdir(parents=True, exist_ok=True)
    (out / ROWS).unlink(missing_ok=True)
    with open_writer("verl-sft", out / ROWS) as writer:
        for run in runs:
            async with _selection(run) as selection, aclosing(selection.records()) as records:
                async for record in records:
                    writer.add(record)
        report = writer.close()
    if not report.rows:
        (out / ROWS).unlink()
        raise InputError("no solved attempt with a trainable row in the given runs; SFT needs some")
    return report


@asynccontextmanager
async def _selection(run: Path) -> AsyncGenerator[Selection]:
    database = read_run(run)
    try:
        yield Selection(RunStore(database), only_passed=True)
    finally:
        await database.close()


def _launch(runner: Sequence[str], overrides: Overrides, folder: Path, schema: str) -> Launch:
    # Hydra's own notes go into the run folder, not into whatever directory we are in.
    hydra: Overrides = {"hydra.run.dir": str(folder.resolve() / "logs"), "hydra.output_subdir": None}
    return Launch((*runner, *arguments(overrides | hydra)), environment(overrides, folder), schema)


def _need_verl(found: Callable[[str], object] = find_spec) -> None:
    if found("verl") is None:
        raise ConfigError(
            "veRL is not installed in this environment. It needs one of its own: scripts/verl_env.sh makes .venv-verl "
            "(or: pip install 'openforgerl[verl]'); then run that environment's openforgerl"
        )
