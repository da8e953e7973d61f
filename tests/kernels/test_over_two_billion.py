"""Tensors of 2^31 elements and more: what a launch is given still fits its kernel's types and CUDA's grids, or PyTorch's own runs.

On the meta device, where tensors have shapes and no memory; the launches are recorded, not made.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulation.device import forget_launches

from advisor.ops import catalog, dispatch, nvrtc, sources, verify
from advisor.ops.family import Case, Family

LEAST_PADDING = 64  # negative sizes that are meant
GRID = (2**31 - 1, 65535, 65535)
TARGETS = (2**31, 2**33)  # elements of the input; the second in 32-bit counts of bytes, and of pairs, too
# Of each family a case of each set of kernels, at full size.
CASES: dict[tuple[Any, ...], tuple[Family, Case]] = {}
for _family in catalog.FAMILIES:
    for _case in _family.benchmark:
        if _family.captured:  # the images' batches come from loaders
            CASES.setdefault((_family.id, *(w.kernels for w in _case.passes.values())), (_family, _case))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[int, ...], tuple[Any, ...]]]]:
    """(entry, grid, numbers by their type in the source) of what would have been launched on an H200."""
    seen: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = []

    def function(name: str, entry: str, defines: tuple[tuple[str, int], ...], *_: Any, **__: Any) -> Any:
        types = sources.parameters(name, entry, defines)

        def launch(grid: Any, block: Any, arguments: Any, *_: Any, **__: Any) -> None:
            typed = zip(types, arguments, strict=True)
            seen.append((entry, tuple(grid), tuple(one for one in typed if one[0] != sources.ADDRESS)))

        return launch

    stands_in = {
        "function": function, "unavailable": lambda: "", "on_device": lambda tensor: "", "arch": lambda device: 90,
        "sm_count": lambda device: 132, "stream": lambda device: None, "tickets": lambda device: 0,
        "refused": lambda name: "",
    }  # fmt: skip
    forget_launches()
    for name, value in stands_in.items():
        monkeypatch.setattr(nvrtc, name, value)
    with dispatch.everything():
        yield seen
    monkeypatch.undo()
    forget_launches()
    dispatch.clear()


def large(case: Case, elements: int) -> tuple[Any, ...]:
    """The case's arguments with the batch that gives its input this many elements, on the meta device."""
    n = -(-elements // math.prod(case.shape[1:]))
    small = case.inputs(verify.seeded("cpu", 0), 2)

    def grown(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = (n, *value.shape[1:]) if value.shape[:1] == (2,) else tuple(value.shape)
        held = torch.empty(shape, dtype=value.dtype, device="meta")
        if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
            held = held.to(memory_format=torch.channels_last)
        return held.requires_grad_(value.requires_grad)

    return tuple(map(grown, small))


@pytest.mark.parametrize("elements", TARGETS)
@pytest.mark.parametrize(("family", "case"), CASES.values(), ids=lambda v: getattr(v, "label", getattr(v, "id", "")))
def test_launches_fit_or_pytorchs_own_runs(launches, family: Family, case: Case, elements: int) -> None:
    arguments = large(case, elements)
    outputs = verify.tensors(case.ours(*arguments))
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    if "backward" in case.passes:
        torch.autograd.grad(outputs, leaves, [torch.empty_like(y) for y in outputs], allow_unused=True)
    assert launches or any(dispatch.fell_back.values()), "neither ran"
    for entry, grid, values in launches:
        assert all(1 <= n <= most for n, most in zip(grid, GRID, strict=False)), (entry, grid)
        for letter, value in values:
            struct.pack(f"@{letter}", value)  # as a launch does: it refuses what these bits cannot hold
            assert letter in "fd" or value > -LEAST_PADDING, (entry, value)  # far below zero has wrapped around


def test_a_size_beyond_32_bits_is_refused_not_wrapped() -> None:
    with pytest.raises(struct.error):
        struct.pack("@i", 2**31)
