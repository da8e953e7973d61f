"""Pooling in plain torch: the definition that tests hold the kernels to, in fp64.

Windows are cut out with `unfold` over an index image, so that padding, ceil_mode and dilation are those of the definition
and not of PyTorch's own pooling kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from advisor.ops.pooling import spec
from advisor.ops.pooling.spec import Pair, PoolWindow


def _taps(x: torch.Tensor, window: PoolWindow) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values [N, C, OH, OW, K], whether each is inside the image [OH, OW, K], and inside the padded image [OH, OW, K]."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = window.kernel, window.stride, window.padding, window.dilation
    _, _, height, width = x.shape
    out_height, out_width = window.output(height, width)
    rows = torch.arange(out_height, device=x.device)[:, None] * sh - ph + torch.arange(kh, device=x.device) * dh
    columns = torch.arange(out_width, device=x.device)[:, None] * sw - pw + torch.arange(kw, device=x.device) * dw
    inside = _both((rows >= 0) & (rows < height), (columns >= 0) & (columns < width))
    padded = _both(rows < height + ph, columns < width + pw)
    h = rows.clamp(0, height - 1)[:, None, :, None]
    w = columns.clamp(0, width - 1)[None, :, None, :]
    return x[:, :, h, w].flatten(-2), inside, padded


def _both(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return (rows[:, None, :, None] & columns[None, :, None, :]).flatten(-2)


def max_pool2d(
    x: torch.Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    ceil_mode: bool = False,
) -> torch.Tensor:
    """The largest value of each window; NaN where one is in it. Of equal values the first gets the gradient.

    Args:
        x: [N, C, H, W], any float dtype.
    """
    window = spec.window(kernel, stride, padding, dilation, ceil_mode)
    values, inside, _ = _taps(x, window)
    shown = torch.where(inside, values.detach(), -torch.inf)
    order = torch.arange(window.taps, device=x.device)
    best = shown.amax(-1, keepdim=True)
    chosen = torch.where(inside & (shown == best), order, window.taps).amin(-1)
    last_nan = torch.where(inside & shown.isnan(), order, -1).amax(-1)
    chosen = torch.where(last_nan >= 0, last_nan, chosen)
    return values.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)


def bias_relu_max_pool2d(x: torch.Tensor, bias: torch.Tensor, *window: Any) -> torch.Tensor:
    """`max_pool2d` of relu(x + bias). bias: [C]; `window` as `max_pool2d` takes it."""
    return max_pool2d(torch.relu(x + bias.view(1, -1, 1, 1)), *window)


def avg_pool2d(
    x: torch.Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """The sum of each window over its divisor: its area in the padded image, or in the image, or a constant.

    Args:
        x: [N, C, H, W], any float dtype.
    """
    values, inside, padded = _taps(x, spec.window(kernel, stride, padding, ceil_mode=ceil_mode))
    total = torch.where(inside, values, 0).sum(-1)
    if divisor_override is not None:
        return total / divisor_override
    return total / (padded if count_include_pad else inside).sum(-1).to(x.dtype)


def global_avg_pool2d(x: torch.Tensor) -> torch.Tensor:
    """[N, C, 1, 1]: the mean over all pixels of x [N, C, H, W]."""
    return x.mean((2, 3), keepdim=True)
