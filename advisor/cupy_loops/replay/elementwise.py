"""Calls of CuPy's that compute each element of their result from the elements at its place: what they compute, as an expression of CUDA's.

Expressions and types are those of CuPy's own ufuncs (cupy/_core/_routines_math.pyx, _routines_logic.pyx, cupy/_math/misc.py of CuPy 14): operands
are converted to the type that the operands have in common, and what comes out to the type of the result. Products, sums and differences are
rounded one by one, so that fused calls give to the bit what CuPy's kernels give.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from advisor.cupy_loops.replay.calls import Element, Entry, Operand
from advisor.cupy_loops.replay.memory import apart

# CUDA's names of NumPy's types; what is not here is not fused.
C_TYPES = {
    "float32": "float",
    "float64": "double",
    "int64": "long long",
    "int32": "int",
    "uint8": "unsigned char",
    "bool": "bool",
}
_BINARY = ("add", "sub", "mul", "truediv")
_ARITHMETIC = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv", "true_divide": "truediv"}
_COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_COMPARISONS = {
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq", "not_equal": "ne"
}  # fmt: skip
_ROUNDED = {"add": "add", "sub": "sub", "mul": "mul"}  # CUDA's intrinsics that are never contracted: __dadd_rn …
_SIGNS = {"add": "+", "sub": "-", "mul": "*"}
# Of one floating operand: CuPy's kernel calls CUDA's function of this name.
_FUNCTIONS = {
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p",
    "sqrt": "sqrt", "sin": "sin", "cos": "cos", "tan": "tan", "tanh": "tanh", "sinh": "sinh", "cosh": "cosh",
    "arctan": "atan", "floor": "floor", "ceil": "ceil",
}  # fmt: skip
_CONVERTED = frozenset({"astype", "copy", "positive", "__pos__"})
_NUMBERS = (bool, int, float, np.floating, np.integer, np.bool_)
MOST_DIMENSIONS = 8


def element(number: int, entry: Entry, arrays: dict[int, Any]) -> Element | None:
    """What the entry at `number` computes of each element; None where it is no such call.

    Args:
        arrays: the arrays of the recorded step, by place.
    """
    if entry.how != "run" or entry.nested:
        return None
    if entry.masked is not None:
        return _masked(number, entry, arrays)
    if entry.run is not None or entry.keys or not entry.single or len(entry.gives) != 1 or entry.fresh:
        return None
    operands = _operands(entry)
    found = _expression(entry.name, len(operands)) if operands is not None else None
    if found is None or operands is None:
        return None
    code, kind, turned, in_place = found
    if turned:
        operands = operands[::-1]
    place = entry.gives[0]
    result = arrays[place]
    inside = _inside(kind, operands, arrays, str(result.dtype))
    if inside == "float64" and not in_place and _asked_for_single(kind, result, operands, arrays):
        inside = "float32"
    if inside is None or not _fits(result, operands, arrays, in_place, entry, inside):
        return None
    if inside in ("float32", "float64") and kind == "rounded":
        letter = "f" if inside == "float32" else "d"
        code = f"__{letter}{_ROUNDED[code]}_rn({{0}}, {{1}})"
    elif kind == "rounded":
        code = f"{{0}} {_SIGNS[code]} {{1}}"
    return Element(number, code, tuple(operands), inside, str(result.dtype), place, tuple(result.shape), in_place)


def _operands(entry: Entry) -> list[Operand] | None:
    """In the order of the call; None where one is neither an array nor a number."""
    if entry.name in _CONVERTED and entry.size <= 2 and len(entry.arrays) == 1:  # what else is given says the type
        return [Operand(place=entry.arrays[0][1])]
    if any(not _is_number(value) for _, value in entry.constants):
        return None
    found = {position: Operand(value=value) for position, value in entry.constants}
    found |= {position: Operand(place=place) for position, place in entry.arrays}
    found |= {position: Operand(scalar=number) for position, number in entry.scalars}
    return [found[position] for position in sorted(found)] if len(found) == entry.size else None


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) and bool(np.isfinite(value))


def _expression(name: str, count: int) -> tuple[str, str, bool, bool] | None:
    """The expression, how its type is found, whether the operands are turned round, and whether the first is changed in place."""
    plain = name.strip("_") if name.startswith("__") else name
    if count == 1:
        if name in _FUNCTIONS:
            return f"{_FUNCTIONS[name]}({{0}})", "float", False, False
        if name in ("__neg__", "negative"):
            return "-{0}", "common", False, False
        if name == "square":
            return "{0} * {0}", "common", False, False
        if name in ("__abs__", "absolute", "abs"):
            return "fabs({0})", "float", False, False
        return ("{0}", "result", False, False) if name in _CONVERTED else None
    if count == 3:
        return ("({0} != 0 ? {1} : {2})", "chosen", False, False) if name == "where" else None
    if count != 2:
        return None
    if name.startswith("__"):
        if plain in _COMPARED:
            return f"{{0}} {_COMPARED[plain]} {{1}}", "compared", False, False
        for before in ("", "r", "i"):
            if plain.startswith(before) and plain[len(before) :] in _BINARY:
                return (*_binary(plain[len(before) :]), before == "r", before == "i")
        return None
    if name in _ARITHMETIC:
        return (*_binary(_ARITHMETIC[name]), False, False)
    if name in _COMPARISONS:
        return f"{{0}} {_COMPARED[_COMPARISONS[name]]} {{1}}", "compared", False, False
    if name in ("maximum", "minimum"):
        return f"({{0}} != {{0}} || {{1}} != {{1}} ? NOT_A_NUMBER : f{name[:3]}({{0}}, {{1}}))", "float", False, False
    return None


def _binary(name: str) -> tuple[str, str]:
    return ("{0} / {1}", "divided") if name == "truediv" else (name, "rounded")


def _inside(kind: str, operands: list[Operand], arrays: dict[int, Any], gives: str) -> str | None:
    """The type in which it is computed."""
    types: list[Any] = []
    for operand in operands[1:] if kind == "chosen" else operands:
        if operand.place >= 0:
            types.append(arrays[operand.place].dtype)
        elif operand.scalar >= 0:
            types.append(0.0)
        else:
            types.append(operand.value)
    if kind == "result":
        return gives if gives in C_TYPES else None
    try:
        found = str(np.result_type(*types))
    except (TypeError, OverflowError):
        return None
    if kind == "divided" and not found.startswith("float"):
        found = "float64"
    if kind == "float" and not found.startswith("float"):
        return None
    if found == "bool" and kind == "rounded":
        return None
    return found if found in C_TYPES else None


def _asked_for_single(kind: str, result: Any, operands: list[Operand], arrays: dict[int, Any]) -> bool:
    """Whether fp32 and whole numbers gave fp32: the ufunc was asked for it (changes/single.py), and computes in it."""
    kinds = {arrays[op.place].dtype.kind if op.place >= 0 else "" for op in operands}
    single = any(op.place >= 0 and str(arrays[op.place].dtype) == "float32" for op in operands)
    return kind in ("rounded", "divided") and str(result.dtype) == "float32" and single and kinds <= {"f", "i", "u"}


def _fits(
    result: Any, operands: list[Operand], arrays: dict[int, Any], in_place: bool, entry: Entry, inside: str
) -> bool:
    """Whether types and shapes are those that the expression is right for."""
    gives, shape = str(result.dtype), tuple(result.shape)
    if gives not in C_TYPES or 0 in shape or len(shape) > MOST_DIMENSIONS or not apart(result):
        return False
    if in_place:
        if operands[0].place != entry.gives[0]:
            return False
    elif gives not in (inside, "bool") or any(operand.place == entry.gives[0] for operand in operands):
        return False
    for operand in operands:
        if operand.place >= 0:
            like = arrays[operand.place]
            if str(like.dtype) not in C_TYPES or not _spreads(tuple(like.shape), shape):
                return False
    return True


def _spreads(small: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array of the first shape is broadcast to the second."""
    if len(small) > len(shape):
        return False
    pairs = zip(reversed(small), reversed(shape), strict=False)
    return all(a in (1, b) for a, b in pairs)


def _masked(number: int, entry: Entry, arrays: dict[int, Any]) -> Element | None:
    """`target[mask] op= number`."""
    assert entry.masked is not None
    name, value = entry.masked
    by_position = dict(entry.arrays)
    target, mask = by_position.get(0, -1), by_position.get(1, -1)
    if target < 0 or mask < 0 or not _is_number(value):
        return None
    result = arrays[target]
    kind, shape = str(result.dtype), tuple(result.shape)
    if (
        kind not in ("float32", "float64")
        or not shape
        or 0 in shape
        or len(shape) > MOST_DIMENSIONS
        or not apart(result)
    ):
        return None
    letter, plain = "f" if kind == "float32" else "d", name.strip("_")[1:]
    changed = {"": "{2}", "truediv": "({0} / {2})"}.get(plain) or f"__{letter}{_ROUNDED[plain]}_rn({{0}}, {{2}})"
    operands = (Operand(place=target), Operand(place=mask), Operand(value=value))
    return Element(number, f"({{1}} != 0 ? {changed} : {{0}})", operands, kind, kind, target, shape, target=True)
