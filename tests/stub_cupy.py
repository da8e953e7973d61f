"""A module that stands for CuPy where there is no GPU: arrays of NumPy's under a class that Python made, functions beside it."""

from __future__ import annotations

import types
from typing import Any

import numpy as np


class ElementwiseKernel:
    """The part of CuPy's that tests need: a Python function in the place of the source."""

    def __init__(self, in_params: str, out_params: str, operation: Any, name: str = "kernel") -> None:
        self.name, self.operation = name, operation

    def __call__(self, *args: Any) -> Any:
        return self.operation(*args)


class RawKernel:
    """A kernel's source, and a Python function that does what it says on NumPy's arrays."""

    def __init__(self, code: str, name: str, operation: Any) -> None:
        self.code, self.name, self.operation = code, name, operation

    def __call__(self, grid: Any, block: Any, args: Any) -> None:
        self.operation(*args)


def module() -> types.ModuleType:
    """A fresh one, so that what a test leaves in it is nobody else's."""
    made = types.ModuleType("cupy")
    own = type("ndarray", (np.ndarray,), {"get": lambda array: np.array(array).view(np.ndarray)})

    def owned(result: Any) -> Any:
        if isinstance(result, np.generic):
            result = np.asarray(result)
        return result.view(own) if isinstance(result, np.ndarray) and type(result) is not own else result

    def function(name: str, plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return owned(plain(*args, **kwargs))

        call.__name__ = name
        call.__module__ = "cupy"
        return call

    for name in ["sum", "mean", "max", "min", "argmax", "var", "std", "dot", "__getitem__"]:
        setattr(own, name, function(name, getattr(np.ndarray, name)))
    for name in [
        "array",
        "asarray",
        "zeros",
        "ones",
        "empty",
        "full",
        "zeros_like",
        "ones_like",
        "empty_like",
        "arange",
        "eye",
        "exp",
        "log",
        "sqrt",
        "tanh",
        "maximum",
        "minimum",
        "add",
        "multiply",
        "subtract",
        "divide",
        "dot",
        "matmul",
        "tensordot",
        "einsum",
        "where",
        "pad",
        "concatenate",
        "stack",
        "rollaxis",
        "transpose",
        "reshape",
        "sum",
        "mean",
        "var",
        "argmax",
        "broadcast_to",
        "clip",
        "take",
        "power",
        "negative",
        "isfinite",
        "ascontiguousarray",
    ]:
        setattr(made, name, function(name, getattr(np, name)))
    made.random = types.SimpleNamespace(
        seed=np.random.seed,
        randn=function("randn", np.random.randn),
        rand=function("rand", np.random.rand),
        permutation=function("permutation", np.random.permutation),
    )
    made.asnumpy = lambda a: np.array(a).view(np.ndarray)
    made.ndarray, made.ufunc, made.ElementwiseKernel, made.RawKernel = own, np.ufunc, ElementwiseKernel, RawKernel
    made.float32, made.float64, made.newaxis = np.float32, np.float64, None
    return made
