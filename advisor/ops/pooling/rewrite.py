"""Finds max, average and global average pooling in a captured graph, as modules, functions or `x.mean((2, 3))`; and max-pooling
behind a convolution's bias and ReLU, which become part of it."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import dispatch, match, storage
from advisor.ops.bias_act.rewrite import bias_of, without_bias
from advisor.ops.pooling import api, spec
from advisor.ops.pooling.spec import Pair, PoolWindow

_MAX_PARAMETERS = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_MAX_DEFAULTS = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
_AVG_PARAMETERS = (
    "input",
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)
_AVG_DEFAULTS = {
    "stride": None,
    "padding": 0,
    "ceil_mode": False,
    "count_include_pad": True,
    "divisor_override": None,
}
_TARGETS = (
    F.max_pool2d,
    torch.max_pool2d,
    F.avg_pool2d,
    F.adaptive_avg_pool2d,
    F.adaptive_max_pool2d,
    torch.mean,
    "mean",
)


def pair(value: Any) -> Pair | None:
    """(h, w) from a number or a sequence of one or two; None when it is neither."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(values) == 1:
        values *= 2
    return (values[0], values[1]) if len(values) == 2 and all(type(v) is int for v in values) else None


def max_pool_window(node: fx.Node) -> tuple[fx.Node, PoolWindow] | str | None:
    """Input and window of a max-pooling call, or why it is left alone; None when the node is none."""
    if node.op != "call_function" or node.target not in (F.max_pool2d, torch.max_pool2d):
        return None
    bound = match.bound(node, _MAX_PARAMETERS, _MAX_DEFAULTS)
    if bound["return_indices"]:
        return "return_indices=True"
    sizes = [pair(bound[name]) for name in ("kernel_size", "stride", "padding", "dilation")]
    if bound["stride"] in (None, (), []):
        sizes[1] = sizes[0]
    kernel, stride, padding, dilation = sizes
    if kernel is None or stride is None or padding is None or dilation is None:
        return "sizes are dynamic"
    return bound["input"], spec.window(kernel, stride, padding, dilation, bool(bound["ceil_mode"]))


def refused(node: Any, window: PoolWindow | None, operation: str) -> str:
    """Why the kernels do not take `node`'s value, as far as the graph tells: the layout is known when it runs."""
    x = match.value(node)
    shape = None if x is None else match.static_shape(x)
    if x is None or shape is None:
        return "its input's shape is not known"
    dtype = match.dtype_name(x)
    reason = spec.TENSORS.refusal(shape=shape, channels_last=True, dtype=dtype, arch=storage.MIN_ARCH)
    if not reason and window is not None:
        reason = spec.unsupported_window(window, height=shape[2], width=shape[3])
    return dispatch.refusal(reason, spec.wins(operation, dtype=dtype, nbytes=math.prod(shape) * x.element_size()))


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operations in, each pooling call by itself. `report` gains one entry a call.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operations.
    """
    calls = {node: match.path(node) for node in graph_module.graph.nodes if node.target in _TARGETS}
    for node, path in calls.items():
        found = _max(node, compiled) or _avg(node, compiled) or _adaptive(node, compiled) or _mean(node, compiled)
        if found is None:
            continue
        label, reason = found
        if reason:
            report.unmatched[path] = reason
        else:
            report.matched[path] = label


def _put(node: fx.Node, function: Any, arguments: tuple[Any, ...], *, output: int | None = None) -> fx.Node:
    """`function(*arguments)` in place of `node`; of several outputs the one numbered `output`."""
    with node.graph.inserting_before(node):
        call = node.graph.call_function(function, arguments)
        if output is not None:
            call = node.graph.call_function(operator.getitem, (call, output))
    match.replace(node, call)
    return call


def _max(node: fx.Node, compiled: bool) -> tuple[str, str] | None:
    found = max_pool_window(node)
    if found is None or isinstance(found, str):
        return None if found is None else ("", found)
    x, window = found
    if not compiled and _put_behind_bias(node, x, window):  # Inductor would have the bias and ReLU in a pass of its own
        return f"{spec.BIAS_RELU} {window.label}", ""
    reason = refused(x, window, "max_pool")
    if not reason and compiled:
        _put(node, torch.ops.advisor.max_pool2d.default, (x, *window.arguments), output=0)
    elif not reason:
        _put(node, api.max_pool2d, (x, *window.arguments))
    return f"max_pool {window.label}", reason


def _put_behind_bias(node: fx.Node, relu: fx.Node, window: PoolWindow) -> bool:
    """Whether a convolution's bias and ReLU, which nobody else sees, have become part of the pooling that follows."""
    convolution = match.operand(relu) if isinstance(relu, fx.Node) else None
    if not isinstance(convolution, fx.Node) or convolution.target is not F.conv2d:
        return False
    bias = bias_of(convolution)
    if bias is None or match.activation(relu) != ("relu", 0.0):
        return False
    if match.only_user(relu) is not node or match.only_user(convolution) is not relu:
        return False
    if spec.unsupported_bias(window) or refused(convolution, window, spec.BIAS_RELU):
        return False
    plain = without_bias(convolution)
    with node.graph.inserting_before(node):
        call = node.graph.call_function(api.bias_relu_max_pool2d, (plain, bias, *window.arguments))
    match.replace(node, call, (relu, convolution))
    return True


def avg_pool_window(node: fx.Node) -> tuple[fx.Node, PoolWindow, bool, int | None] | str | None:
    """Input, window, whether padding counts, and another divisor of an average pooling; why it is left alone; None for others."""
    if node.op != "call_function" or node.target is not F.avg_pool2d:
        return None
    bound = match.bound(node, _AVG_PARAMETERS, _AVG_DEFAULTS)
    kernel, padding = pair(bound["kernel_size"]), pair(bound["padding"])
    stride = kernel if bound["stride"] in (None, (), []) else pair(bound["stride"])
    if kernel is None or stride is None or padding is None:
        return "sizes are dynamic"
    window = spec.window(kernel, stride, padding, ceil_mode=bool(bound["ceil_mode"]))
    return bound["input"], window, bool(bound["count_include_pad"]), bound["divisor_override"]


def _avg(node: fx.Node, compiled: bool) -> tuple[str, str] | None:
    found = avg_pool_window(node)
    if found is None or isinstance(found, str):
        return None if found is None else ("", found)
    return _put_avg(node, *found, compiled)


def _put_avg(
    node: fx.Node, x: fx.Node, window: PoolWindow, include: bool, divisor: int | None, compiled: bool
) -> tuple[str, str]:
    reason = refused(x, window, "avg_pool")
    if reason and divisor is None and is_whole(window, x):
        return _put_global(node, x, compiled, keepdim=True)  # which may be of more pixels than a window
    if not reason:
        function = torch.ops.advisor.avg_pool2d.default if compiled else api.avg_pool2d
        _put(node, function, (x, window.kernel, window.stride, window.padding, window.ceil_mode, include, divisor))
    return f"avg_pool {window.label}", reason


def is_whole(window: PoolWindow, x: fx.Node) -> bool:
    """Whether the window is the image, so that there is one."""
    image = match.value(x)
    return image is not None and window.kernel == tuple(image.shape[2:]) and not any(window.padding)


def _adaptive(node: fx.Node, compiled: bool) -> tuple[str, str] | None:
    if node.target is F.adaptive_max_pool2d:
        return "", "no kernel for adaptive max-pooling"
    if node.op != "call_function" or node.target is not F.adaptive_avg_pool2d:
        return None
    bound = match.bound(node, ("input", "output_size"), {})
    wanted = bound["output_size"]
    x = match.value(bound["input"])
    shape = None if x is None else match.static_shape(x)
    if shape is None or len(shape) != 4:
        return "", "its input's shape is not known" if shape is None else f"{len(shape)}-D input"
    sizes = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted, wanted]
    output = pair([size if given is None else given for size, given in zip(shape[2:], sizes, strict=False)])
    if output is None:
        return "", "sizes are dynamic"
    if output == (1, 1):
        return _put_global(node, bound["input"], compiled, keepdim=True)
    if output == shape[2:]:
        return _identity(node, bound["input"])
    if shape[2] % output[0] or shape[3] % output[1]:
        return "", "windows of unequal size"
    kernel = shape[2] // output[0], shape[3] // output[1]
    return _put_avg(node, bound["input"], spec.window(kernel, kernel), True, None, compiled)


def _identity(node: fx.Node, x: fx.Node) -> tuple[str, str]:
    """Pooling to the size that the input has (VGG at 224): the input's own values, so nothing is left to run.

    PyTorch gives a copy of them. So both must stay as they are: not seen is only a caller that writes into what it gave the graph.
    """
    if match.changed_in_place(node) or match.changed_in_place(x):
        return "", "its input or output is changed in place"
    if match.handed_out(node) or match.handed_out(x):
        return "", "its input or output leaves the graph"
    if not match.recorded_alike(x, node):
        return "", "it or its input runs without gradients"
    if _strides(node) != _strides(x):
        return "", "its input has other strides"
    node.replace_all_uses_with(x)
    node.graph.erase_node(node)
    return "identity", ""


def _strides(node: fx.Node) -> tuple[int, ...] | None:
    found = match.value(node)
    return None if found is None else found.stride()


def _mean(node: fx.Node, compiled: bool) -> tuple[str, str] | None:
    found = match.mean(node)
    if found is None:
        return None
    of, dims, keepdim = found
    x = match.value(of)
    if x is None or x.dim() != 4 or dims != [2, 3]:
        return None
    return _put_global(node, of, compiled, keepdim=keepdim)


def _put_global(node: fx.Node, x: fx.Node, compiled: bool, *, keepdim: bool) -> tuple[str, str]:
    reason = refused(x, None, "global_avg_pool")
    if not reason:
        function = torch.ops.advisor.global_avg_pool2d.default if compiled else api.global_avg_pool2d
        mean = _put(node, function, (x,))
        if not keepdim:
            users = list(mean.users)
            with mean.graph.inserting_after(mean):
                flat = mean.graph.call_function(torch.flatten, (mean, 1))
            flat.meta.update(mean.meta)
            for user in users:
                user.replace_input_with(mean, flat)
    return "global_avg_pool", reason
