"""Attention in parts equals attention over everything, by the kernel and by the device-neutral path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from openforgerl.engines import torch_attention
from openforgerl.engines.torch_attention import attend, merge


@pytest.fixture(params=["kernel", "neutral"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "neutral":
        monkeypatch.setattr(torch_attention, "FLASH_KERNEL", None)
    else:
        assert torch_attention.FLASH_KERNEL is not None


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.usefixtures("path")
def test_attend_is_softmax_attention() -> None:
    q, k, v = random(2, 3, 5, 8), random(2, 3, 7, 8), random(2, 3, 7, 8) * 2
    scores = q @ k.transpose(-1, -2) * 0.3
    out, lse = attend(q, k, v, scale=0.3)
    torch.testing.assert_close(out, scores.softmax(-1) @ v, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("path")
def test_causal_and_mask() -> None:
    q, k, v = random(1, 2, 6, 8), random(1, 2, 6, 8) + 1, random(1, 2, 6, 8) * 2
    scores = q @ k.transpose(-1, -2) * 0.5
    allowed = torch.ones(6, 6).tril().bool()
    expected = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v
    torch.testing.assert_close(attend(q, k, v, scale=0.5, causal=True)[0], expected, atol=1e-5, rtol=1e-5)

    absent = torch.tensor([[0.0, 0.0, 0.0, 0.0, float("-inf"), float("-inf")]])[:, None, None]
    expected = scores[..., :4].softmax(-1) @ v[..., :4, :]
    torch.testing.assert_close(attend(q, k, v, scale=0.5, mask=absent)[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 60.0, -60.0])
def test_parts_merge_to_the_whole(offset: float) -> None:
    """Also when one part carries nearly all the weight."""
    q, k, v = random(1, 2, 4, 8), random(1, 2, 9, 8), random(1, 2, 9, 8)
    k[:, :, :5] += offset / 8 * q.mean(dim=2, keepdim=True)
    whole = attend(q, k, v, scale=1.0)
    first = attend(q, k[:, :, :5], v[:, :, :5], scale=1.0)
    rest = attend(q, k[:, :, 5:], v[:, :, 5:], scale=1.0)
    both: Callable[..., tuple[torch.Tensor, torch.Tensor]] = merge
    for merged in (both(*first, *rest), both(*rest, *first)):
        torch.testing.assert_close(merged[0], whole[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(merged[1], whole[1], atol=1e-4, rtol=1e-5)
