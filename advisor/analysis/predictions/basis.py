"""What predictions share: rates that are reached, limits of a row, and how a basis is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from advisor.analysis.rows import launches
from advisor.analysis.view import View
from advisor.analysis.whatif import GRAPH_NODE_US, OP_LOW_US, Change, Saving, Step
from advisor.core import roofline
from advisor.core.profile import KernelRow
from advisor.core.units import percent_text

# Share of the measured matrix rate that convolutions reach. Measured on one H200 with cuDNN 9.19: bf16 NHWC 3x3 450 to 713
# of about 790 TFLOP/s forward; TF32 backward down to 140 of about 400.
MATRIX_BEST, MATRIX_WORST = 0.9, 0.35
# Share of copy bandwidth that elementwise kernels reach: 0.291 ms needed, 0.395 ms taken by a bf16 GELU on one H200.
POINTWISE_BEST, POINTWISE_WORST = 0.9, 0.74

Predictor = Callable[[View, Step, Mapping[str, str]], Change | None]


def nothing(basis: str) -> Change:
    """The transform finds nothing to do."""
    return Change(worst=Saving(), best=Saving(), basis=basis)


def share(view: View, chosen: Iterable[KernelRow], step: Step) -> str:
    """As "12 kernels that take 34 % of the step"."""
    chosen = list(chosen)
    time = sum(row.time_us for row in chosen) * step.scale
    return f"{launches(chosen):.0f} {'kernels' if view.on_gpu else 'operators'} that take {percent_text(time / step.step_us)} of the step"


def limit_us(view: View, row: KernelRow, *, dtype: str, byte_factor: float = 1.0) -> float:
    """The row's roofline limit on this machine, µs; 0 where it is not known."""
    return roofline.limit_us(
        view.profile.environment, nbytes=row.modelled_bytes * byte_factor, flops=row.flops, dtype=dtype
    )


def own_dtype(row: KernelRow) -> str:
    """What the row computes in."""
    return "tf32" if row.dtype == "fp32" and row.tensor_core else row.dtype


def is_nhwc(view: View, row: KernelRow) -> bool:
    """Whether the row runs in NHWC, or the model does where rows do not say."""
    return row.layout == "nhwc" or (not row.layout and view.profile.model.channels_last)


def bytes_us(view: View, nbytes: float) -> float:
    """Time for these bytes at copy bandwidth, µs; 0 where that was not measured."""
    bandwidth = view.profile.environment.copy_gbps
    return nbytes / (bandwidth * 1e3) if bandwidth > 0 else 0.0


def gain_to(time: float, target: float) -> float:
    """Time saved by reaching a target that is known (above zero) and shorter."""
    return max(0.0, time - target) if target > 0 else 0.0


def trained(row: KernelRow) -> bool:
    """Whether the row is part of forward and backward."""
    return row.phase not in ("optimizer", "average")


def without_tensor_cores(view: View, row: KernelRow) -> bool:
    """A depthwise convolution on a GPU: PyTorch's kernels multiply it channel by channel in every precision."""
    geometry = view.geometry(row) if view.on_gpu else None
    return geometry is not None and geometry.depthwise


def replayable(row: KernelRow) -> bool:
    """Whether CUDA graphs for forward and backward hold the row; loss, metrics and optimizer are launched one by one as before."""
    return row.phase != "optimizer" and bool(row.module or row.phase == "backward")


def issued(view: View, rows: Iterable[KernelRow]) -> float:
    """Of these rows the kernels a step that the host launches one by one: not those that a graph replays, though the traced steps launch
    them."""
    return launches(row for row in rows if not (view.profile.model.graphed and replayable(row)))


def launching_us(view: View, rows: Iterable[KernelRow]) -> float:
    """What launching these kernels takes a step at least: of the host's time, or from one node of a replayed graph to the next."""
    rows = list(rows)
    by_host = issued(view, rows)
    return by_host * OP_LOW_US + (launches(rows) - by_host) * GRAPH_NODE_US
