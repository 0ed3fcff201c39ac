"""The tiny model's renderer, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.testing.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def renderer(model_dir: Path) -> ChatRenderer:
    return load_renderer(model_dir)
