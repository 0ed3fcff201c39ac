"""The archive that `torch.save` writes, for plain values, without torch.

`torch.load` reads a zip file whose members lie in one folder: `data.pkl` (a pickle of protocol 2), `version` and
`byteorder`. Values without tensors need nothing else. Source: torch/serialization.py and
caffe2/serialize/inline_container.h (file format version 3).
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

_FOLDER = "archive"
_MOMENT = (1980, 1, 1, 0, 0, 0)
"""The same values give the same bytes."""


def save_plain(value: Any, path: Path) -> None:
    """Write `value`, made of dicts, lists, strings, numbers and None, as `torch.load(weights_only=True)` reads it."""
    members = {"data.pkl": pickle.dumps(value, protocol=2), "byteorder": b"little", "version": b"3\n"}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(f"{_FOLDER}/{name}", _MOMENT), content)
