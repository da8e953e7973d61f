"""The loss of the running step: what its last backward pass began with, as it was before a GradScaler scaled it."""

from __future__ import annotations

from typing import Any

import torch

# Losses are kept for many steps. A copy is a kernel more in the step, and not worth it for less.
LARGE_BYTES = 1024


class LatestLoss:
    """Detached, and never waited for."""

    def __init__(self) -> None:
        self._loss: torch.Tensor | None = None
        self._scaled: tuple[torch.Tensor, torch.Tensor] | None = None  # the scaled one, and what it was before

    def scaled(self, plain: Any, scaled: Any) -> None:
        """A GradScaler has scaled a loss: the plain one is the one to remember."""
        if isinstance(plain, torch.Tensor) and isinstance(scaled, torch.Tensor):
            self._scaled = (scaled, plain.detach())

    def backward_starts(self, tensors: Any) -> None:
        """A backward pass begins with these: a loss, where it is one tensor of one number."""
        tensor = tensors if isinstance(tensors, torch.Tensor) else None
        if tensor is None and isinstance(tensors, (tuple, list)) and len(tensors) == 1:
            tensor = tensors[0]
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
            return
        if self._scaled is not None and tensor is self._scaled[0]:
            tensor = self._scaled[1]
        self._loss = tensor.detach()

    def backward_done(self) -> None:
        """What was scaled is used."""
        self._scaled = None

    def take(self) -> torch.Tensor | None:
        """The loss, which the next step has not; None where there was none."""
        loss, self._loss = self._loss, None
        return None if loss is None else _alone(loss)


def _alone(loss: torch.Tensor) -> torch.Tensor:
    """The loss without what lies behind its one number: `mse_loss` gives it in a storage as large as what it has compared."""
    return loss.clone() if type(loss) is torch.Tensor and loss.untyped_storage().nbytes() > LARGE_BYTES else loss
