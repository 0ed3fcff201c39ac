"""Arbitrary trees of calls over the real chat templates of model families (see `test_call_trees.py`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given, settings

from openforgerl.rendering import ChatRenderer, load_renderer

from .conftest import byte_level
from .families import BY_NAME
from .speech import said
from .test_call_trees import FAST, SESSIONS, RendererOf, Speak, check, played


@pytest.fixture(scope="session")
def renderer_of(tmp_path_factory: pytest.TempPathFactory) -> RendererOf:
    """A family's renderer, and how it speaks."""

    @cache
    def get(name: str) -> tuple[ChatRenderer, Speak]:
        directory = tmp_path_factory.mktemp("families") / "model"
        BY_NAME[name].write(directory, byte_level([]))
        return load_renderer(directory), partial(spoken, BY_NAME[name].form)

    return get


def spoken(form: str, text: str, calls: Sequence[tuple[str, Any]], **how: Any) -> str:
    """An answer in the family's form; Llama's holds one call."""
    return said(form, text, calls[:1] if form.startswith("llama") else calls, **how)


@pytest.mark.parametrize("name", list(BY_NAME))
@settings(FAST, max_examples=8)
@given(**SESSIONS)
def test_any_tree_of_calls(name: str, seed: int, deeds: list[Any], order: random.Random, renderer_of: Any) -> None:
    check(played(name, renderer_of, seed, deeds), order)
