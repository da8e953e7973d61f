"""A kernel with all of a launch that depends on shapes, dtypes and variant only: families make one for each of these, and keep it.

What a number is to a kernel, an int, a long or a float, is read from its source (sources.parameters), where it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from advisor.ops import nvrtc, sources


@dataclass(frozen=True, slots=True)
class Launch:
    """All of a launch but its addresses, and the numbers that change from call to call.

    Attributes:
        kernel: as ops/cuda_driver's.
        sizes: the numbers behind the kernel's tensors.
        partials: fp32 values that it leaves in between, where it does.
        cooperative: its blocks wait for each other.
    """

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    sizes: tuple[int | float, ...]
    device: int
    shared_bytes: int = 0
    partials: int = 0
    cooperative: bool = False

    def leaving(self, partials: int) -> Launch:
        """As it is, of a kernel that leaves so many fp32 values in between."""
        return replace(self, partials=partials)

    def run(self, *tensors: Any, behind: Sequence[int | float] = ()) -> None:
        """Launch on torch's current stream.

        Args:
            tensors: in the kernel's order; None for none. An int is an address, an array a struct.
            behind: what the kernel takes behind its sizes.
        """
        addresses = [0 if t is None else t.data_ptr() if isinstance(t, Tensor) else t for t in tensors]
        self.kernel(
            self.grid,
            self.block,
            (*addresses, *self.sizes, *behind),
            self.shared_bytes,
            nvrtc.stream(self.device),
            cooperative=self.cooperative,
        )


def launch(
    source: str,
    defines: Mapping[str, int],
    device: int,
    grid: Sequence[int] | int,
    threads: Sequence[int] | int,
    sizes: Sequence[int | float] = (),
    *,
    entry: str = "",
    shared_bytes: int = 0,
) -> Launch:
    """The launch of a kernel of `kernels/<source>`, compiled at the first use.

    Args:
        entry: the kernel's name; empty where the source has but one.
        grid, threads: blocks, and threads of one, in up to three dimensions.
        sizes: the numbers behind the kernel's addresses, as far as they are the same in all calls.
        shared_bytes: of dynamic shared memory.
    """
    (name,) = (entry,) if entry else sources.entries(source)
    return Launch(
        nvrtc.function(source, name, tuple(defines.items()), device, shared_bytes),
        three(grid),
        three(threads),
        tuple(sizes),
        device,
        shared_bytes,
    )


def three(sizes: Sequence[int] | int) -> tuple[int, int, int]:
    """One, two or three sizes as the driver takes them."""
    x, y, z = (*((sizes,) if isinstance(sizes, int) else sizes), 1, 1)[:3]
    return x, y, z
