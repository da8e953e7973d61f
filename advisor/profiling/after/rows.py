"""Pieces of work → rows per kernel × op × module × phase × source line, each with its share of its operator's cost.

Convolutions also by the sizes of their input and weight: a captured forward is one module, and has many under one kernel's name; a head
that several levels of a pyramid share is one module as well.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass

from advisor.core import roofline
from advisor.core.environment import Environment
from advisor.core.profile import KernelRow
from advisor.core.provenance import Provenance
from advisor.core.trace import Trace
from advisor.profiling.trace import calls, kinds, shapes
from advisor.profiling.trace.hosttree import HostTree

_EXPANDED = re.compile(r"\b0\b")  # a stride of 0: one element in memory stands for many
MAX_NAME = 1000  # characters of a kernel's name that are kept; templates can make them ten thousand long


@dataclass(frozen=True, slots=True)
class Precision:
    """Which fp32 products may run as TF32 (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)."""

    tf32_conv: bool = False
    tf32_matmul: bool = False


@dataclass(slots=True)
class WorkItem:
    """One piece of work: a device record, or on a CPU an operator's own time."""

    name: str
    op: int  # event the work was started from; -1 if none
    ns: int
    stream: int = 0
    grid: str = ""
    block: str = ""
    dram: float | None = None
    device: int = 0


def rows(
    work: list[WorkItem], trace: Trace, tree: HostTree, environment: Environment, precision: Precision, steps: int
) -> tuple[tuple[KernelRow, ...], float]:
    """Rows with their shares of their operators' modelled cost, longest first; and the limit of the step.

    GPUs work side by side: the limit is that of the one with most to do.
    """
    time_of: dict[int, int] = defaultdict(int)  # by the operator instance whose model covers the work
    for item in work:
        if item.op >= 0:
            time_of[_unit(tree, item.op)] += item.ns
    inner = _inner_bytes(trace, tree, time_of.keys() - {-1})
    groups: dict[tuple[str, ...], list[float]] = {}
    longest: dict[tuple[str, ...], tuple[int, WorkItem]] = {}
    costs: dict[int, tuple[float, float, float]] = {}
    limits: dict[int, float] = defaultdict(float)  # by GPU
    for item in work:
        op, unit = item.op, _unit(tree, item.op)
        owner = tree.owner[op] if op >= 0 and tree.owner[op] >= 0 else op
        key: tuple[str, ...] = (
            item.name if len(item.name) <= MAX_NAME else item.name[: MAX_NAME - 1] + "…",
            tree.name(owner),
            tree.module[op] if op >= 0 else "",
            tree.phase(op),
            tree.line[op] if op >= 0 else "",
            _operands(trace, owner),
        )
        sums = groups.get(key)
        if sums is None:
            sums = groups[key] = [0.0] * 7  # calls, ns, flops, bytes, limit, DRAM bytes, with DRAM bytes
        if unit >= 0 and unit not in costs:
            costs[unit] = _cost(trace, unit, inner[unit], environment, precision)
        flops, nbytes, limit = costs.get(unit, (0.0, 0.0, 0.0))
        share = item.ns / time_of[unit] if unit >= 0 and time_of[unit] else 0.0
        sums[0] += 1
        sums[1] += item.ns
        sums[2] += flops * share
        sums[3] += nbytes * share
        sums[4] += limit * share
        limits[item.device] += limit * share / steps
        if item.dram is not None:
            sums[5] += item.dram
            sums[6] += 1
        if key not in longest or item.ns > longest[key][0]:
            longest[key] = (item.ns, item)
    found = [_row(trace, tree, longest[key][1], key, sums, steps) for key, sums in groups.items()]
    found.sort(key=lambda row: (-row.time_us, row.name, row.module, row.source))
    return tuple(found), max(limits.values(), default=0.0)


def _row(
    trace: Trace, tree: HostTree, item: WorkItem, key: tuple[str, ...], sums: list[float], steps: int
) -> KernelRow:
    """A row of what has this key, from the sums over all steps; `item`: the longest piece of it."""
    ops = trace.ops
    name, op_name, module, phase, source, _ = key
    op, unit = item.op, _unit(tree, item.op)
    owner = tree.owner[op] if op >= 0 and tree.owner[op] >= 0 else op
    in_conv = unit >= 0 and unit != owner and kinds.kind_of_op(ops.name[unit]) == "conv"
    path, _, module_type = module.partition("|")
    return KernelRow(
        name=name,
        kind=_kind(trace, item, op_name, name, phase, in_conv),
        op=op_name,
        module=path,
        module_type=module_type,
        phase=phase,
        source=source,
        calls=sums[0] / steps,
        time_us=sums[1] / 1e3 / steps,
        grid=item.grid,
        block=item.block,
        stream=item.stream,
        dtype=cost_of(trace, owner).dtype if owner >= 0 else "",
        layout=_layout(trace, owner, unit, name),
        shapes=ops.shapes[owner] if owner >= 0 and ops.shapes else "",
        flops=sums[2] / steps,
        dram_bytes=sums[5] / steps if sums[6] else None,
        dram_provenance=Provenance.MEASURED if sums[6] else Provenance.UNAVAILABLE,
        modelled_bytes=sums[3] / steps,
        limit_us=sums[4] / steps,
        tensor_core=trace.device == "cuda" and kinds.tensor_core(name),
    )


def _kind(trace: Trace, item: WorkItem, op_name: str, name: str, phase: str, in_conv: bool) -> str:
    found = kinds.kind(op_name, name, phase=phase, inside_conv=in_conv)
    if found == "copy" and item.op >= 0 and trace.ops.name[item.op] == "aten::copy_" and trace.ops.strides:
        layouts = shapes.layouts(trace.ops.shapes[item.op], trace.ops.strides[item.op])
        return "layout" if len(set(layouts)) > 1 else found
    return found


def _operands(trace: Trace, op: int) -> str:
    """Shapes of the input and the weight of a convolution or of its backward; "" for any other operator, or where they are not known."""
    ops = trace.ops
    if op < 0 or not ops.shapes or not ops.shapes[op] or kinds.kind_of_op(ops.name[op]) != "conv":
        return ""
    first = 1 if "backward" in ops.name[op] else 0  # behind the output's gradient
    return str(json.loads(ops.shapes[op])[first : first + 2])


def _unit(tree: HostTree, op: int) -> int:
    """The operator instance whose modelled cost covers work started from `op`; -1 if none."""
    if op < 0 or not tree.is_operator(op):
        return -1
    if tree.whole[op] >= 0:
        return tree.whole[op]
    owner = tree.owner[op]
    return -1 if tree.composite[owner] else owner


def cost_of(trace: Trace, op: int) -> calls.Cost:
    """Modelled cost of one operator call; nothing where no shapes were recorded."""
    ops = trace.ops
    if not ops.shapes or not ops.shapes[op]:
        return calls.Cost()
    return shapes.cost(
        ops.name[op],
        ops.shapes[op],
        ops.dtypes[op] if ops.dtypes else "",
        ops.arguments[op] if ops.arguments else "",
        # Only those that tell something: others would fill the cache with what has one cost.
        ops.strides[op] if ops.strides and _EXPANDED.search(ops.strides[op]) else "",
    )


def _inner_bytes(trace: Trace, tree: HostTree, units: Set[int]) -> dict[int, float]:
    """Modelled bytes of the operators that run inside these ones, of each only the outermost: they count the bytes inside them."""
    found: dict[int, float] = defaultdict(float)
    for unit in units:
        outer = tree.parent[unit]
        while outer >= 0 and _unit(tree, outer) not in units:
            outer = tree.parent[outer]
        if outer >= 0:
            found[_unit(tree, outer)] += cost_of(trace, unit).nbytes
    return found


def _cost(
    trace: Trace, unit: int, inner: float, environment: Environment, precision: Precision
) -> tuple[float, float, float]:
    """Flops, bytes and limit in µs of one operator instance.

    An operator that leaves its work to others (`pad`, a loss made of elementwise ones) has the bytes that these, `inner`, leave of its own
    inputs and outputs: as its time on a CPU, which is what theirs leave.
    """
    cost, kind = cost_of(trace, unit), kinds.kind_of_op(trace.ops.name[unit])
    dtype, flops, nbytes = cost.dtype, cost.flops, max(0.0, cost.nbytes - inner)
    tf32 = environment.matrix_tflops.get("tf32", 0.0) > 0  # a CPU has no such rate
    if tf32 and dtype == "fp32" and (precision.tf32_conv if kind == "conv" else precision.tf32_matmul):
        dtype = "tf32"
    # Only products run at the matrix rate; all other work is bounded by its bytes.
    bounding = flops if kinds.matrix(kind) else 0.0
    if environment.rates_doubt:
        return flops, nbytes, 0.0
    return flops, nbytes, roofline.limit_us(environment, nbytes=nbytes, flops=bounding, dtype=dtype)


def _layout(trace: Trace, owner: int, unit: int, kernel: str) -> str:
    strides = trace.ops.strides
    for op in (owner, unit):
        if op >= 0 and strides and strides[op]:
            found = shapes.layout(trace.ops.shapes[op], strides[op])
            if found:
                return found
    lowered = kernel.lower()
    # Conversion kernels name both layouts: that says nothing about the tensor.
    return "nhwc" if "nhwc" in lowered and "nchw" not in lowered else ""


def phases(found: tuple[KernelRow, ...]) -> dict[str, float]:
    """Time of the rows by phase."""
    sums: dict[str, float] = defaultdict(float)
    for row in found:
        sums[row.phase] += row.time_us
    return dict(sums)
