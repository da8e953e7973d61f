"""What torch computes while initcheck watches: on the host, and nothing else touches the device's memory.

Here the device is the CPU too. What a computation got is told by its storage.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from from_host import FromHost, put
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Computed(TorchDispatchMode):
    """Storages that computations, and not copies, views and allocations, have read or written."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
        elif not func.is_view and "empty" not in func.overloadpacket.__name__:
            found = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.storages |= {t.untyped_storage().data_ptr() for t in found}
        return func(*args, **(kwargs or {}))


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def nhwc(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last)


def test_operations_compute_on_copies_and_keep_layout_and_dtype() -> None:
    x = nhwc(2, 8, 3, 5)
    with Computed() as computed, FromHost("cpu"):
        y = (x.relu() * 2).to(torch.bfloat16)
        z = torch.nn.functional.conv2d(x, torch.ones(4, 8, 1, 1))
    assert torch.equal(y, (x.relu() * 2).to(torch.bfloat16))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert z.shape == (2, 4, 3, 5)
    assert computed.storages
    assert storage(x) not in computed.storages
    assert not computed.storages & {storage(y), storage(z)}


def test_every_copy_is_of_dense_memory() -> None:
    wide = nhwc(2, 16, 3, 5)
    with Computed() as computed, FromHost("cpu"):
        y = wide[:, 8:] + torch.ones(3, 1).expand(3, 5)
    assert torch.equal(y, wide[:, 8:] + 1)
    assert computed.copies
    assert all(t.dim() == 1 and t.is_contiguous() for pair in computed.copies for t in pair)


def test_a_write_in_place_comes_back_and_leaves_the_gaps_alone() -> None:
    wide = torch.full((4, 6), float("nan"))
    part = wide[:, 2:4]
    with Computed() as computed, FromHost("cpu"):
        part.zero_()
        assert part.add_(1.0) is part
    assert torch.equal(part, torch.ones(4, 2))
    assert bool(wide[:, :2].isnan().all())
    assert bool(wide[:, 4:].isnan().all())
    assert storage(wide) not in computed.storages


def test_zeros_come_from_the_host() -> None:
    with Computed() as computed, FromHost("cpu"):
        counters = torch.zeros(16, dtype=torch.int32)
    assert counters.tolist() == [0] * 16
    assert storage(counters) not in computed.storages
    assert any(storage(target) == storage(counters) for target, _ in computed.copies)


def test_gradients_compute_on_copies() -> None:
    x = put(nhwc(2, 8, 3, 5).requires_grad_(), "cpu")
    assert x.is_leaf
    with Computed() as computed, FromHost("cpu"):
        (gradient,) = torch.autograd.grad((x * x).sum(), x)
    assert torch.equal(gradient, 2 * x.detach())
    assert computed.storages
    assert not computed.storages & {storage(x), storage(gradient)}


def test_allocations_and_views_stay_what_they_are() -> None:
    x = torch.arange(12.0)
    with FromHost("cpu"):
        view = x.view(3, 4).t()
        assert torch.empty_like(x).shape == x.shape
    assert storage(view) == storage(x)


@pytest.mark.parametrize("shape", [(0,), (), (1, 1)])
def test_small_tensors(shape: tuple[int, ...]) -> None:
    with FromHost("cpu"):
        assert (torch.ones(shape) + 1).shape == shape


def test_our_own_operations_get_the_devices_tensors() -> None:
    """Launched on copies, a kernel would write to the host's addresses."""
    seen: list[int] = []

    @torch.library.custom_op("advisor::test_launch", mutates_args=("y",))
    def launch(y: list[torch.Tensor], x: torch.Tensor) -> None:
        seen.extend((*map(storage, y), storage(x)))

    x, y = torch.ones(3), torch.empty(3)
    with FromHost("cpu"):
        launch([y], x)
    assert seen == [storage(y), storage(x)]


def test_a_tensor_like_another_reads_nothing_of_it() -> None:
    x = nhwc(2, 8, 3, 5)
    with Computed() as computed, FromHost("cpu"):
        y = torch.zeros_like(x)
    assert torch.equal(y, torch.zeros(2, 8, 3, 5))
    assert y.stride() == x.stride()
    assert storage(x) not in {storage(source) for _, source in computed.copies} | computed.storages
