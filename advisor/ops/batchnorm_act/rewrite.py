"""Finds batch_norm (+ add) (+ activation) in a captured graph."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.nn import functional as F

from advisor.ops import consumers, dispatch, match, moments, storage
from advisor.ops.batchnorm_act import api, spec

_PARAMETERS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """A batch_norm call that kernels can take. `momentum` means nothing where there are no running statistics to update."""

    node: fx.Node
    x: fx.Node
    running_mean: fx.Node | None
    running_var: fx.Node | None
    weight: fx.Node | None
    bias: fx.Node | None
    training: bool
    momentum: float
    eps: float
    dtype: str
    joined: bool  # some of its rows are taken for one
    narrow: bool = False  # its parameters and statistics are in half precision

    @property
    def variant(self) -> str:
        """How it differs from the batch norm that most networks train; empty when it does not."""
        if not self.training:
            return spec.FROZEN
        if self.joined:
            return spec.JOINED
        if self.running_mean is None or self.running_var is None:
            return spec.NO_STATISTICS
        return spec.NO_AFFINE if self.weight is None or self.bias is None else ""

    @property
    def shared(self) -> bool:
        """Whether something else in the graph reads or writes the statistics it updates, as a second call of the module does."""
        return self.training and any(len(b.users) > 1 for b in (self.running_mean, self.running_var) if b is not None)

    def updated_by(self, statistics: fx.Node) -> list[tuple[fx.Node, fx.Node, int]]:
        """What is to be copied back: (buffer, the operation's statistics, their row)."""
        buffers = (self.running_mean, self.running_var)
        return [(buffer, statistics, row) for row, buffer in enumerate(buffers, 2) if buffer is not None]


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The nodes that one operation stands for: the norm, then the addition, then the activation, as far as they are there."""

    nodes: tuple[fx.Node, ...]
    residual: fx.Node | None = None
    activation: str = "none"
    slope: float = 0.0

    @property
    def label(self) -> str:
        return spec.name(self.activation, self.residual is not None)


def batch_norm(node: fx.Node, *, joins: bool = False, widens: bool = False, gathers: bool = False) -> BatchNorm | str:
    """The call's arguments, or why it is left alone.

    `joins`: in training rows may be taken for one, where channels are no whole vectors. `widens`: parameters may be in half precision.
    `gathers`: statistics may be those of all ranks.
    """
    bound = match.bound(node, _PARAMETERS, _DEFAULTS)
    training, momentum = bound["training"], bound["momentum"]
    if not isinstance(training, bool):
        return "whether it is in training mode is not known"
    synchronised = training and getattr(F.batch_norm, "synchronised", False)
    if synchronised and not gathers:
        return api.OVER_RANKS
    statistics = [bound.get(name) is not None for name in ("running_mean", "running_var")]
    if any(statistics) != all(statistics):
        return "one running statistic without the other"
    if not isinstance(momentum, (int, float)):
        if training and any(statistics):
            return "momentum is None (cumulative average)"
        momentum = 0.0
    dtypes = set()
    for name in ("weight", "bias", "running_mean", "running_var"):
        if bound.get(name) is None:
            continue
        value = match.value(bound[name])
        if value is None:
            return f"{name} is not known"
        if value.dtype not in ((torch.float32, *consumers.HALF) if widens else (torch.float32,)):
            return f"{name} is {value.dtype}"
        dtypes.add(value.dtype)
    if len(dtypes) > 1:
        return "its parameters and statistics differ in dtype"
    x = match.value(bound["input"])
    if x is None:
        return "its input is not known"
    if x.dim() != 4:
        return f"{x.dim()}-D input"
    if match.empty(x):
        return "its input is empty"
    if not isinstance(x.shape[1], int):
        return "channel count is dynamic"
    dtype = match.dtype_name(x)
    if dtype not in storage.STORAGE:
        return f"dtype {dtype}"
    joined = spec.joined(x.shape[1], dtype) > 1
    if joined and (synchronised or not (joins and training)):
        return f"{x.shape[1]} channels are no multiple of {storage.vector_width(dtype)}"
    if not match.read_later(bound["input"], node):
        return "its input is changed in place elsewhere"
    return BatchNorm(
        node,
        bound["input"],
        bound["running_mean"],
        bound["running_var"],
        bound["weight"],
        bound["bias"],
        training,
        float(momentum),
        float(bound["eps"]),
        dtype,
        joined,
        narrow=bool(dtypes - {torch.float32}),
    )


def _patterns(norm: BatchNorm) -> list[_Pattern]:
    """What the operation could stand for here, the most first."""
    node = norm.node
    found = [_Pattern((node,))]
    user = match.only_user(node)
    if user is None:
        return found
    residual = None if norm.shared else match.addend(user, node)  # the sum comes later than the statistics are read
    if residual is not None and match.read_later(residual, user):
        found.insert(0, _Pattern((node, user), residual))
        after = match.only_user(user)
        follows = match.activation(after) if after is not None else None
        if after is not None and follows is not None and follows[0] in spec.RESIDUAL_ACTIVATIONS:
            found.insert(0, _Pattern((node, user, after), residual, *follows))
    elif (follows := match.activation(user)) is not None and follows[0] in spec.ACTIVATIONS:
        found.insert(0, _Pattern((node, user), None, *follows))
    return found


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Rewrite batch_norm (+ add) (+ activation) in place.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; else the thin eager function is
    called. `report` gains one entry a batch norm.
    """
    graph = graph_module.graph
    running: list[tuple[fx.Node, fx.Node, int]] = []  # statistics to copy back: (buffer, op's second output, row)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not F.batch_norm:
            continue
        norm, path = batch_norm(node, joins=True, widens=not compiled, gathers=not compiled), match.path(node)
        if isinstance(norm, BatchNorm) and norm.variant and compiled:
            norm = f"{norm.variant}: left to Inductor"
        elif isinstance(norm, BatchNorm) and norm.shared and compiled:
            norm = "its running statistics are used elsewhere too: left to Inductor"  # they are copied back at the graph's end
        if isinstance(norm, str):
            report.unmatched[path] = norm
            continue
        reasons: list[str] = []
        for pattern in _patterns(norm):
            wins = spec.wins(
                activation=pattern.activation,
                residual=pattern.residual is not None,
                dtype=norm.dtype,
                variant=norm.variant,
            )
            if norm.narrow:
                wins = wins or dispatch.UNMEASURED  # the kernels are on file, and not with casts around them
            reasons.append(dispatch.refusal("", wins))
            if not reasons[-1]:
                running += _substitute(graph, norm, pattern, compiled=compiled)
                report.matched[path] = pattern.label + (f" ({norm.variant})" if norm.variant else "")
                break
        else:
            report.unmatched[path] = reasons[0]
    if compiled:
        copy_back(graph, running)
    else:
        _count_batches_at_once(graph)


def _substitute(
    graph: fx.Graph, norm: BatchNorm, pattern: _Pattern, *, compiled: bool
) -> list[tuple[fx.Node, fx.Node, int]]:
    last = pattern.nodes[-1]
    tensors: tuple[fx.Node | None, ...] = (
        *(norm.x, pattern.residual),
        *(norm.running_mean, norm.running_var, norm.weight, norm.bias),
    )
    settings = (norm.momentum, norm.eps, pattern.activation, pattern.slope)
    running: list[tuple[fx.Node, fx.Node, int]] = []
    # At the norm's own place where all it takes is known there: who reads the statistics next finds them updated.
    with graph.inserting_before(last if pattern.residual is not None else norm.node):
        if norm.narrow:
            tensors = (*tensors[:2], *(_widened(graph, tensor) for tensor in tensors[2:]))
        arguments = (*tensors, *settings)
        if not norm.training:
            fused = graph.call_function(
                api.frozen_batchnorm_act, (*tensors, norm.eps, pattern.activation, pattern.slope)
            )
        elif compiled:
            call = graph.call_function(torch.ops.advisor.batchnorm_act.default, arguments)
            fused, statistics = match.results(call, 2)
            running += norm.updated_by(statistics)
        else:
            fused = graph.call_function(api.batchnorm_act, arguments)
        if norm.narrow and norm.training:
            for buffer, updated in zip((norm.running_mean, norm.running_var), tensors[2:4], strict=True):
                if buffer is not None:
                    graph.call_method("copy_", (buffer, updated))
    match.replace(last, fused, pattern.nodes[-2::-1])
    return running


def _widened(graph: fx.Graph, tensor: fx.Node | None) -> fx.Node | None:
    """A parameter or statistic in fp32, as kernels read it: a net that is half as a whole has them in fp16. Its gradient is cast back."""
    return None if tensor is None else graph.call_method("float", (tensor,))


def finish(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Norms take the moments of what they normalise from the kernel that made it; and results that are used in several places are
    given out twice, so that the kernels add up the two gradients.

    The last of all rewrites: producers are there by now, and some rewrites look for one node with several users. Inductor, with
    `compiled`, adds gradients up itself, and its operations leave no moments.
    """
    if compiled:
        return
    moments.pair(graph_module.graph, {api.batchnorm_act: _takes_moments})
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target is api.batchnorm_act and _may_fork(node):
            _fork(node)


def _takes_moments(norm: fx.Node) -> str:
    x = match.value(norm.args[0])
    if x is None or match.static_shape(x) is None:
        return "its input's shape is not known"
    if spec.joined(x.shape[1], match.dtype_name(x)) > 1:
        return "some of its rows are taken for one"
    return spec.takes_moments(x.numel() * x.element_size(), norm.args[1] is not None)


# What is said of a tensor's whole gradient, which neither of two handles has.
_OF_THE_GRADIENT = {"register_hook", "retain_grad"}


def _may_fork(norm: fx.Node) -> bool:
    """Whether two handles of the result can stand for it: one graph's operations read it, and nothing else sees it."""
    x = match.value(norm.args[0])
    if x is None or len(norm.users) < 2 or spec.joined(x.shape[1], match.dtype_name(x)) > 1:
        return False
    if any(
        user.op not in ("call_function", "call_method")
        or user.target in _OF_THE_GRADIENT
        or isinstance(user.target, HigherOrderOperator)  # what it does with it is in another graph
        for user in norm.users
    ):
        return False
    activation, residual = cast(str, norm.args[8]), norm.args[1] is not None
    wins = spec.wins(activation=activation, residual=residual, dtype=match.dtype_name(x), variant=spec.FORKED)
    return not dispatch.refusal("", wins) and not match.changed_in_place(norm)


def _fork(norm: fx.Node) -> None:
    """One handle to the first user and the other to the rest: of two users each then has its own."""
    graph, (first, *_) = norm.graph, norm.users
    with graph.inserting_before(norm):
        both = graph.call_function(api.forked_batchnorm_act, norm.args, norm.kwargs)
        one, other = match.results(both, 2)
    one.meta.update(norm.meta)
    first.replace_input_with(norm, one)
    match.replace(norm, other)


def copy_back(graph: fx.Graph, running: list[tuple[fx.Node, fx.Node, int]]) -> None:
    """New running statistics into the module's buffers, all in one multi-tensor copy at the end of the graph."""
    if not running:
        return
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    with graph.inserting_before(output):
        rows = [graph.call_function(operator.getitem, (statistics, row)) for _, statistics, row in running]
        graph.call_function(torch._foreach_copy_, ([buffer for buffer, _, _ in running], rows))


def _count_batches_at_once(graph: fx.Graph) -> None:
    """`num_batches_tracked.add_(1)` of every batch norm as one multi-tensor launch instead of one launch each."""
    counts: list[Any] = [
        node
        for node in graph.nodes
        if node.op == "call_method"
        and node.target == "add_"
        and not node.users
        and node.args[1:] == (1,)
        and (value := match.value(node.args[0])) is not None
        and value.dtype == torch.int64
        and value.dim() == 0
        and node.args[0].op in ("placeholder", "get_attr")
        and len(node.args[0].users) == 1  # else its place counts, and one launch does not write twice to one tensor
    ]
    if len(counts) < 2:
        return
    with graph.inserting_before(counts[-1]):
        graph.call_function(torch._foreach_add_, ([node.args[0] for node in counts], 1))
    for node in counts:
        graph.erase_node(node)
