"""Images as placeholder ids: how many an image takes, and what it must be like to be taken.

A vision model's template writes one placeholder token for an image; the model itself wants one for every
`merge_size` x `merge_size` patches of the resized image. How an image is resized is the published rule of the
image processor that Qwen2-VL brought and its successors (2.5-VL, 3-VL) kept: both sides become multiples of
`patch_size * merge_size`, the number of pixels comes to lie between `min_pixels` and `max_pixels`, and the
proportions stay as near as that allows (`smart_resize` in transformers' `qwen2_vl` image processing).

The size of an image is that of its first frame, turned upright as its EXIF data says. This is the only door of
Pillow in this room; an image is decoded whole once, so that none reaches an engine that cannot read it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
from PIL import Image as Pillow

from openforgerl.errors import InputError, TemplateError
from openforgerl.types import Conversation, Image, JsonValue

MOST_PIXELS = 40_000_000
"""Pixels of an image, decoded; a few kilobytes can claim to be many more."""

PLACEHOLDER = "<|image_pad|>"
"""What the family's templates write for an image, where config.json has no `image_token_id`."""

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor")
"""Classes that resize by the rule above, without the ending that names their backend."""
_BACKENDS = ("Fast", "Pil")
_ORIENTATION = 0x0112
_MOST_STRETCHED = 200
"""Longer side over shorter side; the published rule refuses what is longer."""
_REMEMBERED = 4096
"""Images whose size is kept; an entry is a few hundred bytes."""


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's image processor cuts images. The defaults are those of Qwen2-VL's class."""

    patch_size: int = 14
    """Pixels of a patch's side."""
    merge_size: int = 2
    """Patches of a placeholder's side."""
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more; got {getattr(self, name)}")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels ({self.min_pixels}) is above max_pixels ({self.max_pixels})")

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Patches of an image in time (always 1), height and width. InputError when it is too long and thin."""
        if max(width, height) > _MOST_STRETCHED * min(width, height):
            raise InputError(f"is {width}x{height}; one side may be at most {_MOST_STRETCHED} times the other")
        unit = self.patch_size * self.merge_size
        rows, columns = round(height / unit), round(width / unit)  # to even at one half, as the published rule
        if rows * columns * unit * unit > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / unit))
            columns = max(1, math.floor(width / shrink / unit))
        elif rows * columns * unit * unit < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
        return 1, rows * self.merge_size, columns * self.merge_size

    def count(self, grid: tuple[int, int, int]) -> int:
        """Placeholder ids of an image of that grid."""
        return math.prod(grid) // self.merge_size**2


class MeasuredImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image of a conversation, and what it takes in a prompt."""

    message: int
    """Index of its message."""
    sha256: str
    grid: tuple[int, int, int]
    count: int


class NoImages(msgspec.Struct, frozen=True):
    """A model that takes text only, by the name of its directory; `why` where that is not plain."""

    name: str
    why: str = ""

    def refuse(self, conversation: Conversation) -> None:
        """TemplateError naming the first message that holds an image."""
        for index, _ in images_in(conversation):
            why = f": {self.why}" if self.why else ""
            raise TemplateError(
                f"messages[{index}] holds an image; this model takes no images ({self.name}{why}), send text only"
            )


class Placeholders:
    """What a vision model's prompts hold for images. Remembers the sizes of images it has seen, by their content."""

    def __init__(self, rules: ImageRules, token_id: int) -> None:
        """`token_id` is the placeholder that templates write once for an image."""
        self.rules = rules
        self.token_id = token_id
        self._sizes: dict[str, tuple[int, int]] = {}

    def measured(self, conversation: Conversation, contents: Mapping[str, bytes]) -> list[MeasuredImage]:
        """Every image of the conversation, in order. `contents`: sha256 → bytes.

        TemplateError naming the message of an image that is missing or cannot be taken.
        """
        found: list[MeasuredImage] = []
        for index, image in images_in(conversation):
            try:
                grid = self.rules.grid(*self._size(image.sha256, contents))
            except InputError as error:
                raise TemplateError(f"messages[{index}] holds an image that {error}") from error
            count = self.rules.count(grid)
            found.append(MeasuredImage(message=index, sha256=image.sha256, grid=grid, count=count))
        return found

    def _size(self, sha256: str, contents: Mapping[str, bytes]) -> tuple[int, int]:
        size = self._sizes.get(sha256)
        if size is None:
            if sha256 not in contents:
                raise InputError(f"was not given with its bytes (sha256 {sha256[:12]}...)")
            size = size_of(contents[sha256])
            if len(self._sizes) >= _REMEMBERED:
                self._sizes.clear()
            self._sizes[sha256] = size
        return size


def images_in(conversation: Conversation) -> list[tuple[int, Image]]:
    """Every image with the index of its message, in order."""
    return [
        (index, part)
        for index, message in enumerate(conversation.messages)
        for part in message.parts
        if isinstance(part, Image)
    ]


def size_of(content: bytes) -> tuple[int, int]:
    """Width and height in pixels of an encoded image, which is decoded to see that it can be.

    Raises InputError (what the image is or is not) for anything but a whole PNG, JPEG, GIF or WebP of at most
    `MOST_PIXELS`.
    """
    try:
        with Pillow.open(io.BytesIO(content), formats=_FORMATS) as image:
            width, height = image.size
            if width * height <= MOST_PIXELS:
                image.load()
                if image.getexif().get(_ORIENTATION) in (5, 6, 7, 8):  # lies on its side
                    width, height = height, width
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:
        raise InputError(f"has too many pixels; at most {MOST_PIXELS} are taken") from error
    except Pillow.UnidentifiedImageError as error:
        raise InputError(f"is none of {', '.join(_FORMATS)}") from error
    except Exception as error:  # damaged files make Pillow raise nearly anything
        raise InputError(f"cannot be decoded ({type(error).__name__}: {str(error)[:100]})") from error
    if width * height > MOST_PIXELS:
        raise InputError(f"is {width}x{height}; at most {MOST_PIXELS} pixels are taken")
    return width, height


def rules_in(config: Mapping[str, JsonValue], path: Path) -> ImageRules | str:
    """The rules in an image processor's configuration; as text why images cannot be taken by it.

    `size` may be spelled `shortest_edge` and `longest_edge` (in pixels of the whole image, whatever the names
    say); `min_pixels` and `max_pixels` win. InputError naming file and field for values that cannot be.
    """
    kind = config.get("image_processor_type")
    plain = kind
    for ending in _BACKENDS:
        plain = plain.removesuffix(ending) if isinstance(plain, str) else plain
    if plain not in _PROCESSORS:
        return f"its image processor is {kind}, and only {', '.join(_PROCESSORS)} are known here"
    if config.get("do_resize") is False:
        return "its image processor does not resize"
    size = config.get("size")
    edges: Mapping[str, JsonValue] = size if isinstance(size, dict) else {}
    given = {
        "patch_size": config.get("patch_size"),
        "merge_size": config.get("merge_size"),
        "min_pixels": config.get("min_pixels") or edges.get("shortest_edge"),
        "max_pixels": config.get("max_pixels") or edges.get("longest_edge"),
    }
    try:
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, ImageRules)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: {error}") from error
