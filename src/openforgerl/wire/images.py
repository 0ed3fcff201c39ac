"""Images in requests: from base64 to their content address."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

from openforgerl.errors import WireError
from openforgerl.types import Image
from openforgerl.wire.reading import bad

MEDIA_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""What every dialect's API documents as accepted."""

_DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),(.*)", re.DOTALL)


def from_base64(data: str, media_type: str, path: str) -> tuple[Image, bytes]:
    """The image that `data` spells and its bytes. WireError 400 naming `path`."""
    spelled = "image/jpeg" if media_type == "image/jpg" else media_type
    if spelled not in MEDIA_TYPES:
        raise bad(path, f"must be one of {', '.join(MEDIA_TYPES)}; got {media_type[:40]!r}")
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad(path, "must be an image in valid base64") from error
    if not content:
        raise bad(path, "must not be an empty image")
    return Image(hashlib.sha256(content).hexdigest(), spelled), content


def from_data_url(url: str, path: str) -> tuple[Image, bytes]:
    """The image in a `data:` URL and its bytes. WireError 400 naming `path`; other URLs are never fetched."""
    found = _DATA_URL.fullmatch(url)
    if found is None:
        raise WireError(
            400,
            "unsupported_content",
            f"{path}: must be a `data:` URL with the image in base64; other URLs are not fetched",
            param=path,
        )
    media_type, options, data = found.groups()
    if ";base64" not in options.lower():
        raise bad(path, "must be in base64 (`data:image/png;base64,...`)")
    return from_base64(data, media_type.strip().lower(), path)
