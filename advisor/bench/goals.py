"""How near its limit each kernel is to come: the project's goals for large bf16 tensors, of which the page tells how many cases reach them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from advisor.ops.family import Case

# The dtype in which training happens most.
DTYPE = "bfloat16"
# Tensors that no cache holds: there a kernel is bound by memory, not by its launch.
LARGE_BYTES = 32 * 10**6


def large(case: Case) -> bool:
    """Whether its input is a tensor of LARGE_BYTES and more in DTYPE."""
    return case.dtype == DTYPE and 2 * math.prod(case.shape) >= LARGE_BYTES


def _all(name: str) -> bool:
    return True


def _begins(start: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(start)


def _alone(start: str) -> Callable[[str], bool]:
    """Names that begin so, without those of a convolution and its norm, whose limit has the norm in it."""
    return lambda name: name.startswith(start) and "+" not in name


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A share of the limit (limit / ours) that a family's kernels are to reach.

    Attributes:
        title: in the page.
        family: its id.
        forward, backward: the share, by pass.
        named: of the family's cases those it is for, by name.
    """

    title: str
    family: str
    forward: float
    backward: float
    named: Callable[[str], bool] = _all

    @property
    def shares(self) -> dict[str, float]:
        """Pass → share."""
        return {"forward": self.forward, "backward": self.backward}

    def holds_for(self, family: str, case: Case) -> bool:
        """Whether a case is to reach it: large, channels last, and dispatched."""
        return (
            family == self.family
            and self.named(case.name)
            and large(case)
            and case.layout == "nhwc"
            and not case.wins()
        )


GOALS = (
    Goal(title="batch norm (+ add) (+ activation)", family="batchnorm_act", forward=0.85, backward=0.85),
    Goal(title="depthwise 3×3", family="depthwise", named=_alone("depthwise k3"), forward=0.75, backward=0.65),
    Goal(title="depthwise 5×5", family="depthwise", named=_alone("depthwise k5"), forward=0.6, backward=0.5),
    Goal(title="depthwise 7×7", family="depthwise", named=_alone("depthwise k7"), forward=0.45, backward=0.35),
    Goal(title="grouped 3×3", family="grouped", named=_alone("grouped 3x3"), forward=0.6, backward=0.6),
    Goal(title="max-pool 3×3, stride 2", family="pooling", named=_begins("max_pool k3s2"), forward=0.8, backward=0.7),
    Goal(title="layer norm", family="layer_norm", forward=0.8, backward=0.8),
    Goal(title="group norm", family="group_norm", forward=0.7, backward=0.7),
    Goal(title="bilinear upsampling × 2", family="upsample", named=_begins("bilinear"), forward=0.7, backward=0.7),
)


def missed(family: str, case: Case, row: Mapping[str, Any]) -> bool:
    """Whether a pass of a case that was measured (`row`) is to reach a goal and does not."""
    reached = row["limit_ms"] / row["advisor_ms"]
    return any(goal.holds_for(family, case) and reached < goal.shares[row["pass"]] for goal in GOALS)
