"""Checkpoints that are whole or absent, and loadable by an engine as a model directory.

A checkpoint is written into a hidden directory beside its place, every file is synced, and one rename makes it
visible; so a kill at any moment leaves at most a hidden directory, which the next save or discard removes. A
manifest holds the size and sha256 of every file; loading verifies all of them first. The learner draws no random
numbers and data order is a pure function of seed and step, so weights, optimizer state and step are all there is.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from openforgerl.errors import TrainingError
from openforgerl.training.learner import Learner, no_progress_bars
from openforgerl.types import JsonValue

FORMAT = 1
MANIFEST = "manifest.json"
LEARNER_STATE = "learner.pt"
ADAPTER = "adapter"
"""Folder of an adapter's own files; the weights beside it have it added already."""
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"step-(\d{6,})")
_COMPANIONS = (
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""What an engine reads besides configuration and weights; copied from the directory the model came from."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a checkpoint."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint is made of."""

    format: int
    step: int
    files: dict[str, FileRecord]
    extra: dict[str, JsonValue] = {}
    """What the stage needs to go on (SFT: its curve)."""
    digest: str = ""
    """sha256 over this manifest with an empty digest."""

    def sealed(self) -> Manifest:
        """With its digest filled in."""
        bare = msgspec.structs.replace(self, digest="")
        encoded = msgspec.json.encode(bare, order="deterministic")
        return msgspec.structs.replace(bare, digest=hashlib.sha256(encoded).hexdigest())


def save_checkpoint(
    root: Path,
    step: int,
    learner: Learner,
    *,
    companions: Path | None = None,
    extra: dict[str, JsonValue] | None = None,
) -> Path:
    """Write `root/step-NNNNNN` from the learner's state and return it; an older one of that step is replaced.

    `companions`: model directory whose tokenizer and template files go along, so that `torch:DIR` can serve the
    checkpoint. Raises OSError when the disk refuses; nothing visible has changed then.
    """
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    place = root / f"step-{step:06d}"
    partial = root / f".partial-{place.name}"
    partial.mkdir()
    with no_progress_bars():
        learner.model.save_pretrained(partial, state_dict=learner.weights())
    if learner.adapter is not None:
        learner.adapter.write(partial / ADAPTER)
    torch.save(learner.optimizer_state(), partial / LEARNER_STATE)
    for companion in _companion_files(companions):
        shutil.copyfile(companion, partial / companion.name)
    files = {path.relative_to(partial).as_posix(): _record(path) for path in _files(partial)}
    manifest = Manifest(format=FORMAT, step=step, files=files, extra=extra or {}).sealed()
    (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    if place.exists():
        _remove(place)
    partial.rename(place)
    _sync(root)
    return place


def verify_checkpoint(path: Path) -> Manifest:
    """The manifest of a whole checkpoint. TrainingError naming the first file that is missing, extra or changed."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise TrainingError(f"{path} is no whole checkpoint: {MANIFEST} cannot be read ({error})") from error
    if manifest.format != FORMAT:
        raise TrainingError(f"{path} has checkpoint format {manifest.format}; this version reads {FORMAT}")
    if manifest.sealed() != manifest:
        raise TrainingError(f"{path} is damaged: {MANIFEST} was changed")
    present = {file.relative_to(path).as_posix() for file in _files(path)} - {MANIFEST}
    if present != manifest.files.keys():
        odd = sorted(present ^ manifest.files.keys())
        raise TrainingError(f"{path} is damaged: {', '.join(odd[:5])} missing or not part of it")
    for name, record in manifest.files.items():
        if _record(path / name) != record:
            raise TrainingError(f"{path} is damaged: {name} differs from its manifest")
    return manifest


def load_checkpoint(path: Path, learner: Learner) -> Manifest:
    """Put the learner into the saved state. TrainingError when anything is damaged; the learner is then unchanged."""
    manifest = verify_checkpoint(path)
    weights: dict[str, Tensor] = {}
    adapter: dict[str, Tensor] | None = None
    try:
        if (path / ADAPTER).is_dir():
            adapter = load_file(path / ADAPTER / _ADAPTER_WEIGHTS)
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file)
        state: dict[str, Any] = torch.load(path / LEARNER_STATE, weights_only=True)
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise TrainingError(f"{path} cannot be read: {error}") from error
    learner.restore(weights, state, adapter)
    return manifest


def list_checkpoints(root: Path) -> dict[int, Path]:
    """Step → directory of every visible checkpoint, ascending. Hidden (unfinished) ones do not count."""
    if not root.is_dir():
        return {}
    found = {int(match[1]): path for path in root.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def discard_after(root: Path, step: int) -> list[Path]:
    """Remove every checkpoint of a later step, and unfinished ones: work that was never recorded. What went."""
    gone = [path for number, path in list_checkpoints(root).items() if number > step]
    for path in gone:
        _remove(path)
    if root.is_dir():
        _remove_leftovers(root)
    return gone


def prune(root: Path, keep: int, *, protect: Iterable[int] = ()) -> list[Path]:
    """Keep the `keep` latest checkpoints and the protected steps; remove the others. What went."""
    found = list_checkpoints(root)
    kept = set(list(found)[-keep:]) | set(protect)
    gone = [path for number, path in found.items() if number not in kept]
    for path in gone:
        _remove(path)
    return gone


def _companion_files(directory: Path | None) -> list[Path]:
    if directory is None:
        return []
    return sorted({path for pattern in _COMPANIONS for path in directory.glob(pattern) if path.is_file()})


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(bytes=path.stat().st_size, sha256=digest)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Hide first, then delete: a kill in between leaves nothing that looks like a checkpoint."""
    hidden = path.with_name(f".removed-{path.name}")
    if hidden.exists():
        shutil.rmtree(hidden)
    path.rename(hidden)
    shutil.rmtree(hidden)


def _remove_leftovers(root: Path) -> None:
    for path in [*root.glob(".partial-*"), *root.glob(".removed-*")]:
        shutil.rmtree(path)
