"""Classes of precision, by what one rounding in them is, and in which of them a step computes."""

from __future__ import annotations

import torch

from advisor.trials.numerics.replay import ReplayedCall

# Half a unit in the last place: what one rounding in this class moves a value by.
EPSILON = {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-11, "half": 2.0**-9}

# Classes that round products in every layer.
ROUNDED = ("half", "tf32")


def compute_class(device: torch.device, call: ReplayedCall) -> str:
    """What the script's own convolutions and products round to."""
    if call.autocast[0]:
        return "half"
    dtypes = {p.dtype for p in call.root.module.parameters()}
    if dtypes & {torch.float16, torch.bfloat16}:
        return "half"
    if dtypes == {torch.float64}:
        return "fp64"
    if device.type != "cuda":
        return "fp32"
    try:
        tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # the script uses the newer fp32_precision settings, which refuse to be read this way
        tf32 = True
    return "tf32" if tf32 else "fp32"


def coarser(one: str, other: str) -> str:
    """The class of the two that rounds more."""
    return max(one, other, key=lambda name: EPSILON[name])
