"""TOML and `-s` settings: merged left to right, checked strictly, errors that name the key and the fix."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from openforgerl.config import load_config, resolved_json
from openforgerl.errors import ConfigError


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    steps: int = 1
    name: str = "a"
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be 1 or more; got {self.steps}")


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    inner: Inner = Inner()
    seed: int = 0


def test_settings_win_over_the_file_and_the_file_over_the_base(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("seed = 2\n[inner]\nsteps = 2\nname = 'file'\n")
    config = load_config(Outer, file, ["inner.steps=3"], base={"inner": {"rates": [0.5], "name": "base"}})
    assert config == Outer(inner=Inner(steps=3, name="file", rates=(0.5,)), seed=2)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("inner.name=plain", Inner(name="plain")),
        ("inner.name='quoted'", Inner(name="quoted")),
        ("inner.rates=[1, 2.5]", Inner(rates=(1.0, 2.5))),
        ("inner.name=a=b", Inner(name="a=b")),
    ],
)
def test_a_setting_is_toml_or_a_bare_word(setting: str, expected: Inner) -> None:
    assert load_config(Outer, None, [setting]).inner == expected


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("inner.step=3", "did you mean 'steps'"),
        ("inner.steps=many", r"Expected `int`, got `str` - at `\$.inner.steps`"),
        ("inner.steps=0", "steps must be 1 or more; got 0"),
        ("inner", "write section.key=value"),
        ("inner..steps=1", "write section.key=value"),
    ],
)
def test_a_wrong_setting_names_key_and_fix(setting: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(Outer, None, [setting])


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("seed = [")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load_config(Outer, file, [])
    with pytest.raises(ConfigError, match="cannot read config"):
        load_config(Outer, tmp_path / "absent.toml", [])


def test_the_resolved_config_loads_back(tmp_path: Path) -> None:
    config = load_config(Outer, None, ["seed=7", "inner.steps=4"])
    assert msgspec.json.decode(resolved_json(config), type=Outer) == config
