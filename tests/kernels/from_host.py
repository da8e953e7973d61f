"""What torch computes between our kernels, computed on the CPU: then copies and our own launches alone write device memory.

compute-sanitizer's initcheck, held to our kernels by name, does not see what other kernels write: an input that torch made on
the device looks as if nobody had written it, whereas a copy from the host is a call of the driver, which the tool watches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only


def put(host: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on `device`, with the same strides and as much of a leaf."""
    there = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    _copy(host.detach(), there)
    return there.requires_grad_(host.requires_grad)


class FromHost(TorchDispatchMode):
    """Inside, operations on tensors of `device` compute on copies on the host; allocations, views and our own launches stay as they are.

    Reads and writes of the device's tensors are copies of dense pieces, never of the gaps between them. Gradients too: autograd
    takes the mode along into its own threads.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device).type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func.is_view
            or func.namespace == "advisor"
            or func.overloadpacket.__name__
            in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
        ):
            return func(*args, **kwargs)
        # `randn_like` and its kin want a tensor's shape. What hardware copied there (kernels/include/tensor_map.cuh), initcheck does not see.
        by_shape = func.overloadpacket.__name__.endswith("_like")
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of a tensor's id: itself, and what stands for it

        def fetched(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != self.device:
                return tensor
            if id(tensor) not in copies:
                host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                if not by_shape:
                    _copy(tensor, host)
                copies[id(tensor)] = tensor, host
            return copies[id(tensor)][1]

        asked = kwargs.get("device")
        host_args, host_kwargs = tree_map_only(torch.Tensor, fetched, (args, kwargs))
        if asked is not None:
            host_kwargs["device"] = "cpu"
        found = func(*host_args, **host_kwargs)
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[number] if number < len(args) else kwargs.get(argument.name)
                for tensor, host in copies.values():
                    if tensor is written:
                        _copy(host, tensor)
        stays = torch.device(asked).type != self.device if asked is not None else not copies
        originals = {id(host): tensor for tensor, host in copies.values()}

        def returned(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or stays:
                return value
            return originals[id(value)] if id(value) in originals else put(value, self.device)

        return tree_map(returned, found)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """The same values, for equal shapes and strides, by copies of dense memory: between devices each is one cudaMemcpy."""
    for from_, to in _dense(source, target):
        to.copy_(from_)


def _dense(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors in pieces without gaps, flat. What is expanded counts once."""
    if not one.numel():
        return
    wide = [d for d in range(one.dim()) if one.shape[d] > 1]
    if torch.ops.aten.is_non_overlapping_and_dense(one):
        yield tuple(t.as_strided((t.numel(),), (1,)) for t in (one, other))
        return
    expanded = [d for d in wide if one.stride(d) == 0]
    outer = expanded[0] if expanded else max(wide, key=one.stride)
    count = 1 if expanded else one.shape[outer]
    for i in range(count):
        yield from _dense(one.select(outer, i), other.select(outer, i))
