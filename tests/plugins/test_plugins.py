"""One registry: built-in names, `module:Attribute`, and errors that say what to do."""

from __future__ import annotations

import pytest

from openforgerl import plugins
from openforgerl.errors import ConfigError


@pytest.mark.parametrize("point", sorted(plugins.BUILT_IN))
def test_every_built_in_plugin_loads(point: str) -> None:
    for name in plugins.BUILT_IN[point]:
        assert callable(plugins.load(point, name)), name


def test_any_class_can_be_named() -> None:
    assert plugins.load("harness", "collections:Counter").__name__ == "Counter"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nosuch", "known: claude-code, codex, command"),
        ("nosuch_module:X", "needs nosuch_module, which is not installed"),
        ("collections:Nosuch", "module collections has no 'Nosuch'"),
    ],
)
def test_what_cannot_be_loaded_is_named(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        plugins.load("harness", name)


def test_every_point_has_two_plugins_or_is_not_a_choice_of_the_user() -> None:
    """DESIGN §3: no plugin point without two implementations. These only defer an import (and `verb` too)."""
    alone = [point for point, found in plugins.BUILT_IN.items() if len(found) < 2]
    assert set(alone) <= {"adapter", "diagnosis", "model", "reaping", "rescoring", "verifier"}
