"""Where a model loses channels_last: modules, or operators between two of them, that are given NHWC and return NCHW.

Seen in the forward of a closely looked-at step. A convolution whose weight is NHWC makes NHWC of whatever it is given, so what comes out
NCHW behind it was made so on the way. Elementwise operators and concatenations follow their inputs, and are not to blame.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

# Node of autograd's whose output has the layout of its inputs.
_FOLLOWING = re.compile(
    r"^(Add|Sub|Mul|Div|Neg|Pow|Exp|Log|Abs|Sqrt|Rsqrt|Clamp|Where|Max|Min|Cat|ToCopy|Relu|LeakyRelu|Prelu|Elu|Celu|Selu|Gelu|Silu|Mish|"
    r"Sigmoid|LogSigmoid|Tanh|Hard\w+|Softplus|Threshold|NativeDropout|FusedDropout|AvgPool|MaxPool|ConstantPad|\w*Convolution|"
    r"\w*BatchNorm)"
)
_NODE = re.compile(r"(Backward|Function)\w*$")


@dataclass(slots=True, eq=False)
class _Frame:
    module: torch.nn.Module
    breaks: int  # found before it was called


@dataclass(slots=True, eq=False)
class LayoutWatch:
    """Told of each module's call, in order; `breaks` are (id of the module, what returned NCHW) → times.

    The module is the one that returned, or inside whose forward the operator stands.
    """

    breaks: dict[tuple[int, str], int] = field(default_factory=dict)
    _local: threading.local = field(default_factory=threading.local)
    _found: int = 0

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """`module` is about to run on `args`."""
        stack = self._stack()
        given: Any = args[0] if args else None
        if stack and is_nchw(given) and getattr(self._local, "nhwc", False):
            name = _operator(given)
            if name:
                self._note(stack[-1].module, name)
        stack.append(_Frame(module, self._found))

    def leave(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """It has returned `output`."""
        stack = self._stack()
        while stack and stack[-1].module is not module:
            stack.pop()  # of a call that has raised
        if not stack:
            return
        frame = stack.pop()
        leaf = next(module.children(), None) is None
        given: Any = args[0] if args else None
        if self._found == frame.breaks and is_channels_last(given) and is_nchw(output) and given.dim() == output.dim():
            self._note(module, type(module).__name__ if leaf else _operator(output) or type(module).__name__)
        elif leaf and isinstance(output, torch.Tensor) and output.dim() in (4, 5):
            self._local.nhwc = is_channels_last(output)

    def _note(self, module: torch.nn.Module, what: str) -> None:
        self._found += 1
        self._local.nhwc = False
        key = id(module), what
        self.breaks[key] = self.breaks.get(key, 0) + 1

    def _stack(self) -> list[_Frame]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        found: list[_Frame] = self._local.stack
        return found


def is_channels_last(value: Any) -> bool:
    """Whether a tensor of images or volumes lies in NHWC. One channel or one pixel is contiguous both ways: that says nothing."""
    if not isinstance(value, torch.Tensor) or value.dim() not in (4, 5):
        return False
    wanted = torch.channels_last if value.dim() == 4 else torch.channels_last_3d
    return value.is_contiguous(memory_format=wanted) and not value.is_contiguous()


def is_nchw(value: Any) -> bool:
    """Whether it lies in NCHW, and in that alone."""
    if not isinstance(value, torch.Tensor) or value.dim() not in (4, 5) or not value.is_floating_point():
        return False
    wanted = torch.channels_last if value.dim() == 4 else torch.channels_last_3d
    return value.is_contiguous() and not value.is_contiguous(memory_format=wanted)


def _operator(value: torch.Tensor) -> str:
    """What made the tensor, as autograd names it ("ReflectionPad2D"); "" where it only follows its inputs, or nothing is known of it."""
    node: Any = value.grad_fn
    if node is not None and node.name().startswith("ToCopy"):  # autocast's
        node = node.next_functions[0][0]
    name = _NODE.sub("", node.name().rpartition("::")[2]) if node is not None else ""
    return "" if not name or _FOLLOWING.match(name) else name
