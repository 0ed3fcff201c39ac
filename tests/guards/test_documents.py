"""README and docs point at things that exist; every option a user may set says what it does."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from openforgerl.cli.configs import EvalConfig, RunConfig
from openforgerl.cli.proxy import ProxyConfig
from openforgerl.cli.train import GrpoConfig, SftConfig
from openforgerl.demo.settings import DemoConfig

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATH_IN_CODE = re.compile(r"(?<!\S)(?:src|tests|docs|scripts|benchmarks)/[\w./-]*\w")


def broken(text: str, folder: Path) -> list[str]:
    """Relative links (from `folder`) and paths in code (from the root) that lead nowhere."""
    links = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link and not link.startswith("#")]
    found = [link for link in links if link and not (folder / link).exists()]
    paths = [path for code in CODE.findall(text) for path in PATH_IN_CODE.findall(code)]
    return found + [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    assert broken(document.read_text(), document.parent) == []


def test_a_broken_link_is_caught() -> None:
    text = "[a](docs/absent.md) [b](https://example.org/x) [c](#here) [d](README.md#x) `pytest tests/absent tests/cli`"
    assert broken(text, ROOT) == ["docs/absent.md", "tests/absent"]


def undocumented(source: str, name: str, fields: list[str]) -> list[str]:
    """Fields of class `name` in `source` that no docstring follows. A run of fields may share the last one's."""
    body = re.split(rf"^class {name}\b.*$", source, maxsplit=1, flags=re.MULTILINE)[1]
    body = re.split(r"^(?=\S)|^    def ", body, maxsplit=1, flags=re.MULTILINE)[0]
    lines = body.splitlines()
    return [field for field in fields if not _documented(lines, field)]


def _documented(lines: list[str], field: str) -> bool:
    at = next(number for number, line in enumerate(lines) if line.startswith(f"    {field}:"))
    for line in lines[at + 1 :]:
        if line.startswith('    """'):
            return True
        if line.startswith("    ") and not line[4:5].isspace() and re.match(r"    \w+:", line):
            return False
    return False


def structs(schema: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    yield schema
    for field in msgspec.structs.fields(schema):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from structs(field.type)


def test_an_undocumented_option_is_caught() -> None:
    source = 'class A(Struct):\n    """A."""\n\n    x: int = 1\n    """What x is."""\n    y: int = 2\n'
    source += "\n    def f(self): ...\n"
    assert undocumented(source, "A", ["x", "y"]) == ["y"]


PLAIN = {"memory_mb", "processes", "open_files", "cpu_seconds", "system_prompt", "env", "stdin"}
"""Names that say all there is to say."""


def test_every_option_says_what_it_does() -> None:
    found: list[str] = []
    for struct in {
        s for schema in (RunConfig, EvalConfig, ProxyConfig, GrpoConfig, SftConfig, DemoConfig) for s in structs(schema)
    }:
        module = Path(sys.modules[struct.__module__].__file__ or "")
        own = [
            name
            for name, kind in struct.__annotations__.items()
            if not str(kind).endswith(("Options", "Limits")) and name not in PLAIN
        ]
        found += [f"{struct.__name__}.{name}" for name in undocumented(module.read_text(), struct.__name__, own)]
    assert sorted(found) == []
