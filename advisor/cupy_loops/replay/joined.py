"""`concatenate` and `stack` inside a graph: CuPy's own bring a table of addresses to the device, which a stream that captures does not take."""

from __future__ import annotations

from typing import Any


class Joined:
    """Each array is copied to its part of the result."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def concatenate(self, arrays: Any, axis: int = 0) -> Any:
        """As `cupy.concatenate`."""
        first = arrays[0]
        axis = range(first.ndim)[axis]  # an index out of range says so
        lengths = [value.shape[axis] for value in arrays]
        shape = [*first.shape[:axis], sum(lengths), *first.shape[axis + 1 :]]
        made = self._module.empty(shape, dtype=self._module.result_type(*arrays))
        at = 0
        for value, length in zip(arrays, lengths, strict=True):
            made[(slice(None),) * axis + (slice(at, at + length),)] = value
            at += length
        return made

    def stack(self, arrays: Any, axis: int = 0) -> Any:
        """As `cupy.stack`."""
        first = arrays[0]
        axis = range(first.ndim + 1)[axis]
        shape = [*first.shape[:axis], len(arrays), *first.shape[axis:]]
        made = self._module.empty(shape, dtype=self._module.result_type(*arrays))
        for number, value in enumerate(arrays):
            made[(slice(None),) * axis + (number,)] = value
        return made
