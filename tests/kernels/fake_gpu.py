"""A network's graph as a GPU under bf16 autocast would have it, captured on a machine that has none.

Parameters and the image are fake tensors: they have a shape, a dtype, a layout and the device cuda:0, and no memory. CUDA's autocast
acts on them, which it does not on meta tensors, so that every value of the graph has the dtype it would have. Nothing is computed.

PyTorch's build for the CPU has no device guard for CUDA, and what asks for one fails: autograd, and the few methods that are not
generated. So no tensor wants a gradient here, and those methods are made of operations that ask for none. Two rewrites look whether a
value wants one, the first convolution's at the image and that of scaled sums at a factor a sample: a training's want none either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from advisor.ops import catalog, dynamo, match

DEVICE = torch.device("cuda:0")
Reports = dict[str, match.MatchReport]  # by family


def capture(model: nn.Module, shape: Sequence[int]) -> list[Reports]:
    """What the families' rewrites say of each graph of the model's forward, for an image of this shape. Changes the model."""
    found: list[Reports] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        reports = {family.id: match.MatchReport() for family in catalog.FAMILIES if family.captured}
        dynamo.backend(reports, mode=None)(dynamo.twin(graph), inputs)
        found.append(reports)
        forward: Callable[..., Any] = graph.forward  # as it was: our operations would ask for a GPU
        return forward

    torch._dynamo.reset()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _move(model, mode)
    image = _fake(torch.empty(tuple(shape), device="meta"), mode)
    with _as_on_a_gpu(), mode:
        torch.compile(model.forward, backend=backend, dynamic=False)(image)
    torch._dynamo.reset()
    return found


def _move(model: nn.Module, mode: FakeTensorMode) -> None:
    """Put fake tensors in the place of the model's parameters and buffers."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_fake(parameter, mode), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _fake(buffer, mode)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    """The tensor as if on the GPU; channels_last where it can be."""
    layout = torch.channels_last if tensor.dim() == 4 else torch.preserve_format
    return FakeTensor(mode, tensor.detach().to("meta", memory_format=layout), DEVICE)


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Inside, CUDA's autocast is on, and what a build without CUDA lacks is stood in for."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with ExitStack() as stack:
        for name, function in _STAND_INS.items():
            stack.enter_context(mock.patch.object(FakeTensor, name, function, create=True))
        stack.enter_context(mock.patch.object(torch._C, "_conv_determine_backend_memory_format", _layout))
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])


def _copied(self: FakeTensor, *_: object, **__: object) -> FakeTensor:
    return self  # a copy changes values, of which there are none


def _contiguous(self: FakeTensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    if self.is_contiguous(memory_format=memory_format):
        return self
    return self.clone(memory_format=memory_format)


_INDEX = torch.Tensor.__getitem__


def _indexed(self: FakeTensor, index: Any) -> torch.Tensor:
    """As a tensor of the CPU with the same sizes and strides is indexed: a view of the same memory where that is one."""
    if self.device.type != "cuda":
        return _INDEX(self, index)
    like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="cpu")
    part = _INDEX(like, index)
    if part.untyped_storage()._cdata == like.untyped_storage()._cdata:
        return self.as_strided(part.shape, part.stride(), self.storage_offset() + part.storage_offset())
    return torch.empty_strided(part.shape, part.stride(), dtype=self.dtype, device=self.device)


def _assigned(self: FakeTensor, *_: object) -> None:
    """Changes values, of which there are none."""


# Of torch's Python methods those that ask for a device guard by themselves (python_variable_methods.cpp), as far as forwards call them.
_STAND_INS: dict[str, Callable[..., Any]] = {
    "copy_": _copied,
    "contiguous": _contiguous,
    "__getitem__": _indexed,
    "__setitem__": _assigned,
    "__invert__": lambda self: torch.bitwise_not(self),  # built in, and so no method by itself
}


def _layout(x: torch.Tensor, *_: object) -> torch.memory_format:
    """Of a convolution's result: cuDNN's, given a channels_last image."""
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format
