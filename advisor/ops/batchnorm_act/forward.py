"""A batch norm's forward with a cumulative average (momentum None) that a captured graph can hold.

PyTorch's own takes 1 / float(num_batches_tracked), for which the host waits for the GPU in every call and Dynamo ends the graph. Here
the factor stays a tensor: the norm averages into statistics of one batch, and these go into the running ones with that weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F


def layer(inner: Callable[..., Any], norm: torch.nn.Module) -> Callable[..., Any]:
    """`inner`, a batch norm's forward, with the same results and buffers to rounding, and no value that the host waits for.

    A class with a forward of its own keeps it.
    """
    if type(norm).forward is not torch.nn.BatchNorm2d.forward:
        return inner
    module: Any = norm

    def forward(input: torch.Tensor) -> Any:
        x = input
        tracked = module.training and module.track_running_stats and module.num_batches_tracked is not None
        if module.momentum is not None or not tracked:
            return inner(x)
        module._check_input_dim(x)
        module.num_batches_tracked.add_(1)
        running = module.running_mean, module.running_var
        mean, var = map(torch.zeros_like, running)
        y = F.batch_norm(x, mean, var, module.weight, module.bias, True, 1.0, module.eps)
        factor = module.num_batches_tracked.to(mean.dtype).reciprocal()
        for average, batch in zip(running, (mean, var), strict=True):
            average.lerp_(batch, factor)
        return y

    return forward
