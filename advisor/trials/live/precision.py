"""Which precision a candidate computes in, and the loop as it stands."""

from __future__ import annotations

import torch

from advisor.core import architectures
from advisor.core.findings import Semantics
from advisor.core.transform_row import TOGETHER
from advisor.loop.attach import Attached
from advisor.transforms.base import Transform
from advisor.trials import planner
from advisor.trials.live.loop import Loop


def precision_of(transform: Transform) -> str:
    """The class that a change of precision, or several as one, computes in."""
    names = set(transform.id.split(TOGETHER))
    return "tf32" if "tf32" in names and not names & planner.HALF else "half"


def computes_in(loop: Loop) -> str:
    """What the loop as it stands rounds to inside its models, as far as a look from outside cannot tell."""
    discovery = Attached.discovery
    if discovery is not None and discovery.seen.autocast is not None:
        return "half"
    standing = (s.transform for s in loop.kept.standing if not s.transform.guides)
    kept = {precision_of(transform) for transform in standing if transform.semantics is Semantics.PRECISION}
    return "half" if "half" in kept else "tf32" if kept else "fp64"


def bf16_serves(loop: Loop) -> bool:
    """Whether bf16 is, or was, a candidate on a GPU with bf16 matrix units."""
    least = divmod(architectures.BF16, 10)
    if not loop.on_gpu or torch.cuda.get_device_capability(loop.training.device) < least:
        return False
    tried = (v.transform for v in loop.verdicts())
    return "amp_bf16" in {*tried, *(c.transform for c in loop.session.candidates)}
