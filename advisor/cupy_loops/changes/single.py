"""fp32 where fp64 came in by accident: NumPy's arrays, CuPy's default type, and what mixes whole numbers with fp32.

Nobody asks for fp64 there: `0.02 * np.random.randn(...)` is fp64, `cupy.zeros(n)` is, and an int64 label times an fp32 output is. What a
script asks for by name (`dtype=`, `astype`) it gets, and what is computed of fp64 arrays stays fp64. The random numbers are those of the
plain script, rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from advisor.cupy_loops.changes.base import Change
from advisor.loop.patches import Patches
from advisor.profiling.inside.cupy_surface import LOOKS, METHODS, Surface

DOUBLE, SINGLE = np.dtype(np.float64), np.dtype(np.float32)
# Binary operations, and the ufunc that takes a `dtype` for each; "r" in front of a name turns the operands round.
_BINARY = {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "pow": "power"}
# Of array methods, those whose result may be fp64 where none of their arrays is.
_MAKING = frozenset({"mean", "var", "std", "sum", "dot", "__matmul__", "__rmatmul__", "__truediv__", "__rtruediv__"})
_OPERATORS = {f"__{r}{name}__": (ufunc, bool(r)) for name, ufunc in _BINARY.items() for r in ("", "r")}
_UFUNCS = {name: (name, False) for name in (*_BINARY.values(), "divide", "maximum", "minimum")}
_OF_DEFAULT_TYPE = frozenset({"empty", "zeros", "ones"})  # of a shape: fp64 is what they give unasked
# What takes or gives no numbers, and what must not be told otherwise.
_LEFT_ALONE = frozenset({*LOOKS, "astype", "view", "__setitem__", "copy", "asnumpy", "copyto", "load", "save", "fft"})


class Single(Change):
    """fp32 in place of fp64 that nobody asked for."""

    id = "cupy_single"

    def __init__(self) -> None:
        self.made = 0

    def apply(self, module: Any, patches: Patches) -> None:
        self._module, self._array = module, module.ndarray
        names = _names(module)
        self._surface = Surface(module, self._called, patches)
        self._surface.patch(names)

    def effect(self) -> str:
        return f"{self.made} arrays of fp64 became fp32" if self.made else ""

    def _called(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "dtype" in kwargs or any(_names_a_type(value) for value in args):
            return plain(*args, **kwargs)
        if name in _OF_DEFAULT_TYPE and len(args) == 1:
            self.made += 1
            return plain(*args, dtype=SINGLE, **kwargs)
        double, whole, single, weak = self._look(args)
        if double:
            return plain(*args, **kwargs)
        if weak:  # NumPy's own scalars count as arrays do in promotion
            args = tuple(float(v) if isinstance(v, np.float64) else v for v in args)
        if name in ("array", "asarray", "asanyarray", "ascontiguousarray") and args and isinstance(args[0], np.ndarray):
            if args[0].dtype == DOUBLE:
                self.made += 1
                args = (args[0].astype(SINGLE), *args[1:])
            return plain(*args, **kwargs)
        known = _OPERATORS.get(name) or _UFUNCS.get(name)
        if known is not None and whole and single and len(args) == 2:
            ufunc = getattr(self._module, known[0])
            return ufunc(*(args[::-1] if known[1] else args), dtype=SINGLE, **kwargs)
        result = plain(*args, **kwargs)
        if isinstance(result, self._array) and result.dtype == DOUBLE and kwargs.get("out") is None:
            self.made += 1
            return result.astype(SINGLE)
        return result

    def _look(self, args: tuple[Any, ...]) -> tuple[bool, bool, bool, bool]:
        """Whether among the arguments are arrays of fp64, of whole numbers, of fp32, and scalars of NumPy's in fp64."""
        double = whole = single = weak = False
        for value in args:
            if isinstance(value, self._array):
                if value.dtype == DOUBLE:
                    double = True
                elif value.dtype == SINGLE:
                    single = True
                else:
                    whole = whole or value.dtype.kind in "iu"
            elif isinstance(value, np.float64):
                weak = True
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], self._array):
                double = double or any(isinstance(v, self._array) and v.dtype == DOUBLE for v in value)
        return double, whole, single, weak


def _names_a_type(value: Any) -> bool:
    return isinstance(value, (type, np.dtype)) or (isinstance(value, str) and value in ("d", "f8", "float64", "double"))


def _names(module: Any) -> list[str]:
    """Of the surface, what may make fp64 of what is not."""
    functions = [name for name in vars(module) if not name.startswith("_") and name not in _LEFT_ALONE]
    methods = [name for name in METHODS if name in _OPERATORS or name in _MAKING]
    random = [f"random.{name}" for name in vars(getattr(module, "random", object)) if name != "seed"]
    linalg = [f"linalg.{name}" for name in vars(getattr(module, "linalg", object))]
    return [*functions, *methods, *random, *linalg]
