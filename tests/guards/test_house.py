"""The house as DESIGN §4 draws it, enforced; and each guard shown to catch a planted fault."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "openforgerl"

_spec = importlib.util.spec_from_file_location("house", Path(__file__).with_name("house.py"))
assert _spec is not None and _spec.loader is not None
house = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(house)

SOURCES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if "tasks/" not in str(path.relative_to(PACKAGE)) or path.parent.name == "tasks"
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_source_keeps_the_house_rules(path: Path) -> None:
    assert list(house.findings(path.read_text(), str(path.relative_to(ROOT)))) == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("\n" * 600, "601 lines"),
        ("def f():\n" + "    x = 1\n" * 90, "f has 91 lines"),
        ("def f(a, b, c, d, e, f, g, h, i): ...", "takes 9 parameters"),
        ("try:\n    f()\nexcept ValueError:\n    pass\n", "swallowed"),
        ("cache = {}\n", "mutable module state"),
        ("# TODO later\n", "unfinished"),
    ],
)
def test_each_rule_catches_its_fault(source: str, complaint: str) -> None:
    found = list(house.findings(source, "planted.py"))
    assert len(found) == 1 and complaint in found[0]


def test_a_hiding_name_is_caught() -> None:
    assert "hides a missing noun" in next(iter(house.findings("", "rooms/utils.py")))


def test_imports_go_down_only() -> None:
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["openforgerl.cli.main", "openforgerl.proxy", "openforgerl.orchestrator"])
def test_starting_costs_no_heavy_library(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'kubernetes', 'verl', 'ray'} & set(sys.modules)\n"
        "sys.exit(f'imports {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_private_place_is_named() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    named: list[str] = []
    for line in listed.stdout.splitlines():
        path = ROOT / line
        if not path.is_file() or path.suffix in {".safetensors", ".png"}:
            continue
        if house.PRIVATE_PLACES.search(path.read_text(errors="replace")):
            named.append(line)
    assert named == []
