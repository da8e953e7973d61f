"""Host-side nesting of a trace: for each operator and runtime call, what encloses it and what it is for.

One pass over the operators in order of start. A backward operator is tied to its forward operator by thread and autograd
sequence number (the latest forward operator to start with that number made the backward node) and takes over its module
and source line. Phases come from these ties, from module annotations and from torch's own optimizer ranges, never from
names of kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from advisor.core.trace import OpTable, RuntimeTable
from advisor.profiling.trace.kinds import kind_of_op

FORWARD, BACKWARD, OPTIMIZER, AVERAGE, OTHER = "forward", "backward", "optimizer", "average", "other"

ENGINE = "autograd::engine::evaluate_function"
ACCUMULATE = "torch::autograd::"
LOADER = "enumerate(DataLoader)"
# Torch's own range around an update, and ours in it: torch's is not told of where the window ends inside it.
OPTIMIZER_STEP = ("user:Optimizer.step#", "optimizer:")
CLOSURE = "closure"  # what an update calls inside its own range: forward and backward
_OPTIMIZER_RANGES = (*OPTIMIZER_STEP, "user:Optimizer.zero_grad#")

# Operators that are one step of the operator around them: work is told under the outer name.
_PART_OF: dict[str, frozenset[str]] = {
    name: frozenset(f"aten::{outer}" for outer in outers.split())
    for name, outers in {
        "aten::copy_": "clone contiguous _to_copy",
        "aten::clone": "contiguous",
        "aten::clamp_min": "relu relu_",
        "aten::clamp_min_": "relu_",
        "aten::zero_": "zeros zeros_like new_zeros",
        # Under deterministic algorithms what is allocated is filled, so that no result depends on what was there.
        "aten::fill_": "zero_ ones ones_like full full_like new_ones new_full empty empty_strided empty_like resize_",
        "aten::mul": "mul_",
        "aten::div": "div_ mean",
        "aten::div_": "mean",
        "aten::sum": "mean",
        "aten::_convolution": "convolution",
        "aten::cudnn_convolution": "_convolution convolution",
        "aten::cudnn_convolution_transpose": "_convolution convolution",
        "aten::mkldnn_convolution": "_convolution convolution",
        "aten::thnn_conv2d": "_convolution convolution",
        "aten::_slow_conv2d_forward": "thnn_conv2d _convolution convolution",
        "aten::_conv_depthwise2d": "_convolution convolution",
        "aten::conv_depthwise3d": "_convolution convolution",
        "aten::slow_conv_dilated2d": "_convolution convolution",
        "aten::slow_conv3d_forward": "slow_conv3d _convolution convolution",
        "aten::_slow_conv2d_backward": "convolution_backward",
        "aten::mkldnn_convolution_backward": "convolution_backward",
    }.items()
}
# Operators whose modelled cost covers everything that runs inside them.
_WHOLE = frozenset({"aten::convolution", "aten::convolution_backward"})


@dataclass(slots=True)
class HostTree:
    """Columns beside OpTable, one entry an operator: -1 or "" where there is nothing.

    parent: enclosing event. module: "<path>|<type>". line: "<file>:<line>". owner: the operator under whose name its work
    is told. whole: the operator whose modelled cost covers it. composite: it only passes on to an operator of its own kind
    (batch_norm to native_batch_norm), which has the cost. top: the outermost operator around it.
    """

    ops: OpTable
    parent: list[int] = field(default_factory=list)
    module: list[str] = field(default_factory=list)
    line: list[str] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    composite: list[bool] = field(default_factory=list)
    top: list[int] = field(default_factory=list)
    loading: list[bool] = field(default_factory=list)  # inside a DataLoader's next()
    call_op: list[int] = field(default_factory=list)  # per runtime call: the innermost event around it
    order: list[int] = field(default_factory=list)  # operators by start, outer before inner
    _phase: list[str] = field(default_factory=list)
    _forward_tops: set[int] = field(default_factory=set)

    def is_operator(self, index: int) -> bool:
        """True for operators, False for annotations and for autograd's wrappers around operators."""
        return index >= 0 and self.top[index] >= 0

    def phase(self, index: int) -> str:
        """forward, backward, optimizer, average (of weights), or other where nothing tells."""
        if index < 0:
            return OTHER
        phase = self._phase[index]
        # Outside modules (a functional loss) an operator is forward if a backward node came of it.
        if phase == OTHER and self.top[index] in self._forward_tops:
            return FORWARD
        return phase

    def name(self, index: int) -> str:
        """Name of the operator; of autograd's node for work started without one; "" for annotations."""
        if index < 0 or self.ops.annotation[index]:
            return ""
        return self.ops.name[index].removeprefix(ENGINE + ": ")


def is_activity(annotation: str) -> bool:
    """True for operators and for ranges in which the host is known to prepare work: a module, a call, the optimizer.

    A script's own `record_function` may stand around the whole step and tells nothing.
    """
    return not annotation.startswith(("user:", "step:", CLOSURE)) or annotation.startswith(_OPTIMIZER_RANGES)


def build(ops: OpTable, runtime: RuntimeTable, roles: Mapping[str, str] | None = None) -> HostTree:
    """The nesting of `ops`, and of `runtime` in it. Takes O(n log n) time; events may come in any order.

    `roles`: source line → the phase of what it starts, where no module, optimizer or backward is around it.
    """
    roles = roles or {}
    count = len(ops.name)
    start, end, thread, annotation = ops.start_ns, ops.end_ns, ops.thread, ops.annotation
    tree = HostTree(ops=ops, parent=[-1] * count, module=[""] * count, line=[""] * count, owner=[-1] * count,
                    whole=[-1] * count, composite=[False] * count, top=[-1] * count, loading=[False] * count, call_op=[-1] * len(runtime.name),
                    order=sorted(range(count), key=lambda i: (start[i], -end[i])), _phase=[OTHER] * count)  # fmt: skip
    calls = sorted(range(len(runtime.name)), key=runtime.start_ns.__getitem__)
    forward: dict[tuple[int, int], int] = {}
    stacks: dict[int, list[int]] = {}
    position, total_calls = 0, len(calls)
    for i in tree.order:
        now = start[i]
        while position < total_calls and runtime.start_ns[calls[position]] < now:
            _place_call(tree, runtime, calls[position], stacks)
            position += 1
        stack = stacks.get(thread[i])
        if stack is None:
            stack = stacks[thread[i]] = []
        while stack and end[stack[-1]] <= now:
            stack.pop()
        parent = stack[-1] if stack else -1
        tree.parent[i] = parent
        if parent >= 0:
            tree.module[i], tree.line[i] = tree.module[parent], tree.line[parent]
            tree._phase[i], tree.loading[i] = tree._phase[parent], tree.loading[parent]
        if annotation[i]:
            _enter_annotation(tree, i, annotation[i], roles)
        else:
            _enter_operator(tree, i, parent, forward)
        stack.append(i)
    for call in calls[position:]:
        _place_call(tree, runtime, call, stacks)
    return tree


def _place_call(tree: HostTree, runtime: RuntimeTable, call: int, stacks: dict[int, list[int]]) -> None:
    stack, now, end = stacks.get(runtime.thread[call]), runtime.start_ns[call], tree.ops.end_ns
    if stack is None:
        return
    while stack and end[stack[-1]] <= now:
        stack.pop()
    if stack:
        tree.call_op[call] = stack[-1]


def _enter_annotation(tree: HostTree, i: int, text: str, roles: Mapping[str, str]) -> None:
    kind, _, rest = text.partition(":")
    if kind == "module":
        tree.module[i] = rest
        if tree._phase[i] == OTHER:
            tree._phase[i] = FORWARD
    elif kind == "line":
        tree.line[i] = rest
        if tree._phase[i] == OTHER:
            tree._phase[i] = roles.get(rest, OTHER)
    elif text.startswith(_OPTIMIZER_RANGES):
        tree._phase[i] = OPTIMIZER
    elif text == CLOSURE:
        tree._phase[i] = OTHER
    elif rest.startswith(LOADER):
        tree.loading[i] = True


def _enter_operator(tree: HostTree, i: int, parent: int, forward: dict[tuple[int, int], int]) -> None:
    ops = tree.ops
    name, sequence, forward_thread = ops.name[i], ops.sequence[i], ops.forward_thread[i]
    if forward_thread > 0 or name.startswith((ENGINE, ACCUMULATE)):
        tree._phase[i] = BACKWARD
        made_by = forward.get((forward_thread, sequence), -1) if sequence >= 0 else -1
        if made_by >= 0:
            tree.module[i], tree.line[i] = tree.module[made_by], tree.line[made_by]
            tree._forward_tops.add(tree.top[made_by])
        return
    if sequence >= 0:
        forward[(ops.thread[i], sequence)] = i
    inside = parent if parent >= 0 and tree.top[parent] >= 0 else -1
    tree.top[i] = tree.top[inside] if inside >= 0 else i
    tree.owner[i] = tree.owner[inside] if inside >= 0 and _is_part(name, ops.name[inside]) else i
    if inside >= 0 and tree.owner[i] == i and kind_of_op(name) and kind_of_op(name) == kind_of_op(ops.name[inside]):
        tree.composite[inside] = True
    if inside >= 0 and tree.whole[inside] >= 0:
        tree.whole[i] = tree.whole[inside]
    elif name in _WHOLE:
        tree.whole[i] = i


def _is_part(name: str, outer: str) -> bool:
    # A CPU runs a multi-tensor operator as one call a tensor.
    return outer in _PART_OF.get(name, ()) or outer.startswith(("aten::_foreach_", "aten::_fused_"))
