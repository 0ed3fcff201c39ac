"""What veRL's workers are given of a row that shows images: pixels, grids, and places in three dimensions.

veRL's own loops decode the ids, collapse the placeholders and let the processor write the text again
(`agent_loop.py: _compute_multi_modal_inputs`). Here the ids stay as they are: only the image processor is asked, and
its grids must be those that the placeholders were counted for.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from verl.utils import hf_processor

from openforgerl.errors import ConfigError, ExactnessError
from openforgerl.training.borrowed import upright
from openforgerl.training.rows import Row


class SeenImages:
    """The inputs of rows, by the processor of the model."""

    def __init__(self, processor: Any, token_id: int) -> None:
        """`processor`: as veRL makes it, with `image_processor` and the model's `get_rope_index`. `token_id`: the
        placeholder."""
        self._processor = processor
        self._token_id = token_id

    @classmethod
    def of(cls, model: str, token_id: int) -> SeenImages:
        """By the processor in the model directory, as veRL loads it. ConfigError when it cannot."""
        processor = hf_processor(model)
        if not hasattr(processor, "get_rope_index"):
            raise ConfigError(f"veRL cannot load the image processor of {model} (is torchvision installed?)")
        return cls(processor, token_id)

    def inputs(self, row: Row, images: Mapping[str, bytes]) -> tuple[dict[str, Any], torch.Tensor]:
        """`multi_modal_inputs`, and position ids of shape (4, ids): in the text, then in time, height and width.

        `images`: sha256 → bytes. ExactnessError when the processor cuts an image otherwise than its placeholders say.
        """
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        found: dict[str, Any] = {}
        if row.images:
            shown = [upright(images[image.sha256]) for image in row.images]
            found = dict(self._processor.image_processor(images=shown, return_tensors="pt"))
            grids = found["image_grid_thw"]
            for image, grid in zip(row.images, grids.tolist(), strict=True):
                if tuple(grid) != image.grid:
                    raise ExactnessError(
                        f"row {row.sample_id}: the image processor cuts image {image.sha256[:12]} into {grid}, and its "
                        f"placeholders were counted for {image.grid}: preprocessor_config.json is not what it was"
                    )
            found["images_seqlens"] = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0])
        seen, _ = self._processor.get_rope_index(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            image_grid_thw=found.get("image_grid_thw"),
            video_grid_thw=None,
            mm_token_type_ids=(ids == self._token_id).long(),
        )
        text = torch.arange(ids.shape[1])[None]
        return found, torch.cat([text, seen[:, 0]])
