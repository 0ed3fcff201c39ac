"""Conversations from a file, by what its name says it is."""

from __future__ import annotations

from pathlib import Path

from openforgerl.errors import InputError
from openforgerl.formats.atif_reading import read_atif
from openforgerl.formats.importing import Imported
from openforgerl.formats.openai_jsonl import read_openai_jsonl


def read_conversations(path: Path) -> list[Imported]:
    """OpenAI fine-tuning lines from `*.jsonl`; ATIF from `*.json` or a folder of them.

    Raises InputError for another name, and naming the line or field that cannot be taken.
    """
    if path.is_dir() or path.suffix == ".json":
        return read_atif(path)
    if path.suffix == ".jsonl":
        return read_openai_jsonl(path)
    raise InputError(f"{path}: conversations are read from *.jsonl (OpenAI messages), or ATIF's *.json or a folder")
