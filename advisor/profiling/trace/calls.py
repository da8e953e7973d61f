"""One call of an operator as its record has it: shapes, dtypes, strides and arguments, and how much memory its tensors are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

Shape = Sequence[int]


_BYTES = {
    "float": 4,
    "double": 8,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short int": 2,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}


_SHORT = {
    "float": "fp32",
    "double": "fp64",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short int": "int16",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}


# torch.dtype as operators record it among their arguments: c10::ScalarType.
SCALAR_TYPE_BYTES = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 9: 8, 10: 16, 11: 1, 15: 2, 23: 1, 24: 1}


@dataclass(frozen=True, slots=True)
class Cost:
    """`nbytes` and `flops` of one call; `dtype` is fp64 where a tensor is, else that of its first floating-point tensor ("bf16"), else of the
    first.

    `exact` is False when the operator is unknown: then its output is assumed to be as large as its largest input.
    """

    nbytes: float = 0.0
    flops: float = 0.0
    dtype: str = ""
    exact: bool = False


class OperatorCall:
    """One operator call: tensors with their element sizes, and its other arguments where they were recorded."""

    __slots__ = ("arguments", "sizes", "strides", "tensors", "types")

    def __init__(self, shapes: str, dtypes: str, arguments: str, strides: str) -> None:
        inputs: list[Any] = json.loads(shapes) if shapes else []
        self.strides: list[Any] = json.loads(strides) if strides else []
        types = dtypes.split(",") if dtypes else []
        types += [""] * (len(inputs) - len(types))
        self.types = types
        self.tensors: list[list[int] | None] = []  # by argument position; None where the argument is no tensor
        self.sizes: list[list[tuple[int, int]]] = []  # (elements, bytes of an element) of the tensors of an argument
        default = next((t for t in types if t in _BYTES), "float")
        for entry, kind in zip(inputs, types, strict=False):
            if entry and isinstance(entry[0], list):
                self.tensors.append(None)
                self.sizes.append([(prod(shape), _BYTES[default]) for shape in entry])
            elif kind in _BYTES or (entry and not kind):
                self.tensors.append(entry)
                self.sizes.append([(prod(entry), _BYTES.get(kind, 4))])
            else:
                self.tensors.append(None)
                self.sizes.append([])
        self.arguments: list[Any] = json.loads(arguments) if arguments else []

    def shape(self, index: int) -> list[int] | None:
        return self.tensors[index] if index < len(self.tensors) else None

    def nbytes(self, index: int) -> float:
        return float(sum(n * size for n, size in self.sizes[index])) if index < len(self.sizes) else 0.0

    def elements(self, index: int) -> float:
        return float(sum(n for n, _ in self.sizes[index])) if index < len(self.sizes) else 0.0

    def read_bytes(self, index: int) -> float:
        """Of a tensor that was expanded, what is there to be read: along a dimension of stride 0 that is one element."""
        shape, strides = self.shape(index), self.strides[index] if index < len(self.strides) else []
        if not shape or len(strides) != len(shape):
            return self.nbytes(index)
        return float(prod(n for n, stride in zip(shape, strides, strict=True) if stride) * self.sizes[index][0][1])

    def all_bytes(self) -> float:
        return sum(self.read_bytes(i) for i in range(len(self.sizes)))

    def largest_bytes(self) -> float:
        return max((self.nbytes(i) for i in range(len(self.sizes))), default=0.0)

    def largest_elements(self) -> float:
        return max((self.elements(i) for i in range(len(self.sizes))), default=0.0)

    @property
    def double(self) -> bool:
        """A tensor among them, no single number, is in fp64: then all is computed so."""
        return any(t == "double" and shape for t, shape in zip(self.types, self.tensors, strict=False))

    def promotes(self) -> bool:
        """Tensors in fp64 meet others of fewer bits, so that those are computed in fp64 as well."""
        floats = {_SHORT.get(t, "") for t, shape in zip(self.types, self.tensors, strict=False) if shape}
        return self.double and bool(floats & {"fp32", "fp16", "bf16"})

    def argument(self, index: int) -> Any:
        return self.arguments[index] if index < len(self.arguments) else None

    def dtype(self) -> str:
        if self.double:
            return "fp64"
        # Python's numbers are wrapped as numbers in fp64 and converted: no work, and none that a script could spare itself.
        shorts = [_SHORT[t] for t in self.types if t in _SHORT and t != "double"]
        return next((s for s in shorts if s.startswith(("fp", "bf"))), shorts[0] if shorts else "")
