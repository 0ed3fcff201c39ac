"""Every config that ships is one that `doctor` reads: docs/kubernetes.md has people look before they run."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from openforgerl.cli.doctor import doctor

ROOT = Path(__file__).parents[2]
CONFIGS = sorted([*(ROOT / "recipes").glob("*.toml"), *(ROOT / "deploy").rglob("*.toml")])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_doctor_reads_it(config: Path) -> None:
    done = CliRunner().invoke(doctor, ["--kubernetes", "--config", str(config), "--dry-run"])
    assert done.exit_code == 0, done.output


def test_a_misspelt_section_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[sandbx.kubernetes]\nimage = "x"\n')
    done = CliRunner().invoke(doctor, ["--config", str(tmp_path / "run.toml"), "--dry-run"])
    assert "unknown field `sandbx`" in str(done.exception)
