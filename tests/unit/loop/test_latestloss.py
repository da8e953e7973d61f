"""The loss that is kept of a step: its number, and nothing behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from advisor.loop.latestloss import LARGE_BYTES, LatestLoss


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.l1_loss, F.binary_cross_entropy_with_logits])
def test_a_kept_loss_holds_nothing_that_is_as_large_as_what_it_compared(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Of 64 KiB that were compared 64 KiB stayed with each step: told as a leak of the script's."""
    latest = LatestLoss()
    output = torch.rand(16, 32, 32, requires_grad=True)
    found = loss(output, torch.rand(16, 32, 32))
    latest.backward_starts(found)
    kept = latest.take()
    assert kept is not None
    assert kept.untyped_storage().nbytes() <= LARGE_BYTES < output.untyped_storage().nbytes()
    assert kept.item() == found.item()
    assert latest.take() is None


def test_a_small_loss_is_not_copied() -> None:
    latest = LatestLoss()
    found = torch.ones(4, requires_grad=True).sum()
    latest.backward_starts((found,))
    kept = latest.take()
    assert kept is not None
    assert kept.data_ptr() == found.data_ptr()
