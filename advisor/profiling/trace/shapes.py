"""Modelled flops and minimum device-memory bytes of one operator call, from its recorded shapes and dtypes.

The bytes model is the one of the roofline (Williams, Waterman, Patterson, CACM 52(4), 2009): every input element is read
once, every output element is written once, nothing is kept in a cache between operators. It is a lower bound, never a
measurement. Flops follow Goodfellow, Bengio, Courville, "Deep Learning" §9: a convolution has
2·N·C_out·H_out·W_out·(C_in/groups)·K_h·K_w, each of its two backward products as many; a matrix product 2·m·n·k.
Elementwise work counts one operation an output element, normalisation and pooling a few; they are bounded by bytes.
"""

from __future__ import annotations

import json
from functools import lru_cache
from math import prod

from advisor.profiling.trace.calls import Cost, OperatorCall
from advisor.profiling.trace.costs import model
from advisor.profiling.trace.cupy_names import torch_name


@lru_cache(maxsize=65536)
def cost(op: str, shapes: str, dtypes: str, arguments: str = "", strides: str = "") -> Cost:
    """Modelled cost of one call of `op`.

    Args:
        op: operator name with namespace, `aten::convolution`.
        shapes: JSON list, one entry an argument: a tensor's shape, a list of shapes for a list of tensors, else `[]`.
        dtypes: comma-separated C++ type names of the arguments, as the profiler records them.
        arguments: JSON list with the values of the arguments that are no tensors, null for tensors; "" if unknown.
        strides: as `shapes`, the tensors' strides; "" if unknown.

    Returns:
        Zero bytes when no shapes were recorded. Unknown operators: all tensor inputs read and an output as large as the
        largest input written, `exact=False`.
    """
    try:
        call = OperatorCall(shapes, dtypes, arguments, strides)
    except (ValueError, TypeError):
        return Cost()
    if not call.sizes:
        return Cost()
    name = torch_name(op).rpartition("::")[2]
    try:
        found = model(name, call)
    except (IndexError, TypeError, ValueError, ZeroDivisionError):
        found = None  # an overload with other arguments than the model expects
    if found is None:
        found = Cost(call.all_bytes() + call.largest_bytes(), 0.0, "", False)
    return Cost(found.nbytes, found.flops, call.dtype(), found.exact)


def modelled_bytes(op: str, shapes: str, dtypes: str, arguments: str = "") -> float:
    """Least bytes of device memory that one call reads and writes."""
    return cost(op, shapes, dtypes, arguments).nbytes


def flops(op: str, shapes: str, dtypes: str, arguments: str = "") -> float:
    """Floating-point operations of one call."""
    return cost(op, shapes, dtypes, arguments).flops


@lru_cache(maxsize=65536)
def promotes(shapes: str, dtypes: str) -> bool:
    """Whether an operator is given tensors in fp64 and in fewer bits, so that it computes all of it in fp64."""
    try:
        return OperatorCall(shapes, dtypes, "", "").promotes()
    except (ValueError, TypeError):
        return False


@lru_cache(maxsize=65536)
def layouts(shapes: str, strides: str) -> tuple[str, ...]:
    """ "nhwc" or "nchw" of each dense tensor of four or more dimensions, in order; those that fit both are left out.

    A tensor with one channel or one pixel fits both and tells nothing.
    """
    try:
        pairs = list(zip(json.loads(shapes), json.loads(strides), strict=False)) if strides else []
    except ValueError:
        return ()
    found = []
    for shape, stride in pairs:
        if len(shape) < 4 or len(stride) != len(shape) or isinstance(shape[0], list):
            continue
        channels, spatial = shape[1], prod(shape[2:])
        if channels <= 1 or spatial <= 1:
            continue
        if stride[1] == 1 and stride[-1] == channels:
            found.append("nhwc")
        elif stride[-1] == 1 and stride[1] == spatial:
            found.append("nchw")
    return tuple(found)


def layout(shapes: str, strides: str) -> str:
    """Layout of an operator's first tensor that has one; "" when that cannot be told."""
    return next(iter(layouts(shapes, strides)), "")
