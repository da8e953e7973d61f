"""One declaration of a convolution's operation; it makes the autograd function, the torch.library operation with its fake kernels, the eager entry.

Functions of a declaration get `x` [N, I, H, W], `weight` [O, I / groups, R, S], `bias` [O] or None, and the family's own numbers: stride,
padding and the like. Their order is that of the public function and of the torch.library operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.convolution_support import Sizes, Support
from advisor.ops.function import Function

Gradients = tuple[torch.Tensor | None, ...]
Made = tuple[torch.Tensor, torch.Tensor | None]
Pair = tuple[int, int]
NHWC = torch.channels_last


class ConvGeometry(NamedTuple):
    """What PyTorch's own convolution is told beside its tensors.

    Attributes:
        compute: the dtype in which it runs; None for that of its input.
    """

    stride: int = 1
    padding: Pair = (0, 0)
    dilation: int = 1
    groups: int = 1
    compute: torch.dtype | None = None


def computed_in(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a convolution of x runs: autocast's where that is on, else x's own."""
    kind = x.device.type
    if (
        torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    ):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def cast(x: torch.Tensor) -> torch.Tensor:
    """x as autocast gives it to a convolution."""
    dtype = computed_in(x)
    return x if x.dtype == dtype else x.to(dtype)  # `to` gives a tensor that outlived a transform memory of its own


def dense_gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dx and dweight, where wanted, of a convolution without stride, padding or bias, all tensors in one dtype, by PyTorch's own."""
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        *(dy, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), [wanted[0], wanted[1], False]
    )
    return dx, dweight


@lru_cache(maxsize=4096)
def _unsupported(
    supports: Support,
    shapes: tuple[torch.Size, torch.Size],
    dtypes: tuple[torch.dtype, torch.dtype],
    geometry: ConvGeometry,
    arch: int,
) -> str:
    """What the support says of an input and a weight of these shapes and dtypes."""
    stride, padding, dilation, groups, compute = geometry
    shape, weight_shape = map(tuple, shapes)
    return supports.unsupported(
        Sizes(shape, weight_shape, (stride, stride), padding, (dilation, dilation), groups),
        dtype=storage.name(dtypes[0]),
        weight_dtype=storage.name(dtypes[1]),
        arch=arch,
        compute=storage.name(compute) if compute else "",
    )


@dataclass(eq=False, kw_only=True)
class Convolution:
    """`advisor::<name>`, called as eager code does: by the kernels where nothing is against it, else by PyTorch's own convolution.

    Attributes:
        family: whose counters count its calls.
        supports: what its kernels take.
        numbers: schema of what comes behind the tensors, without defaults: PyTorch leaves out an argument that is its default.
        biased: whether the operation takes a bias.
        geometry: of x and the numbers.
        call: of x, weight, bias and the numbers: what kernels are told of the sizes.
        wins: of the same, why the kernels are not measured to be faster; empty where they are.
        label: of a call, as it is counted; None where `forward` and `gradients` count.
        forward: of x, weight, bias and the call, with `moments` asked for or not: the result, channels_last or like x; its moments
            for a batch norm (ops/moments.py) or None; and what `gradients` needs besides the arguments.
        gradients: of the result's gradient, x, weight, bias, the call, which of the three are wanted, and what the forward kept.
        also: of x and weight, why the kernels cannot take them, for what neither `supports` nor the layout tells.
        nhwc: kernels read x channels_last and aligned.
        replays: as Function's.
        compiles: whether there is a torch.library operation, for graphs that Inductor compiles: x in the dtype of the result, which is
            channels_last, as x's gradient is.
        weight_format: of the weight's gradient in such a graph.
    """

    name: str
    family: str
    supports: Support
    numbers: str = ""
    biased: bool = False
    geometry: Callable[..., ConvGeometry]
    call: Callable[..., Any]
    wins: Callable[..., str]
    label: Callable[[Any], str] | None
    forward: Callable[..., tuple[Any, ...]]
    gradients: Callable[..., Gradients]
    also: Callable[[torch.Tensor, torch.Tensor], str] | None = None
    nhwc: bool = True
    replays: bool = True
    compiles: bool = True
    weight_format: torch.memory_format = torch.contiguous_format
    function: type[Function] = field(init=False)

    def __post_init__(self) -> None:
        if "=" in self.numbers:
            raise ValueError(
                f"{self.name}: {self.numbers} has a default; expected none, for PyTorch leaves such arguments out"
            )
        self._engaged, self._fell_back = dispatch.counters(self.family)
        self.function = self._made_function()
        if self.compiles:
            self._make_operation()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *numbers: Any) -> torch.Tensor:
        """The eager entry."""
        return self._run(x, weight, bias, numbers, moments=False)[0]

    def with_moments(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *numbers: Any) -> Made:
        """As eager code calls it, and the result's moments; None where PyTorch's own ran, or a kernel that leaves none."""
        return self._run(x, weight, bias, numbers, moments=True)

    def _run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        numbers: tuple[Any, ...],
        *,
        moments: bool,
    ) -> Made:
        call = self._taken(x, weight, bias, numbers)
        if call is None:
            return self.pytorch(x, weight, bias, *numbers), None
        found: Made = self.function.apply(x, weight, bias, call, numbers, moments)
        return found

    def _taken(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, numbers: tuple[Any, ...]) -> Any:
        """The call where the kernels take it, else None; counts which of both it is."""
        reason = self.refusal(x, weight, bias, *numbers)
        if reason:
            self._fell_back[reason] += 1
            return None
        call = self.call(x, weight, bias, *numbers)
        if self.label is not None:
            self._engaged[self.label(call)] += 1
        return call

    def unsupported(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *numbers: Any) -> str:
        """Why the kernels cannot take these tensors; empty when they can."""
        reason = nvrtc.on_device(x)
        if reason:
            return reason
        if weight.device != x.device:
            return "weight and input are on different devices"
        if bias is not None and bias.dtype != weight.dtype:
            return "bias and weight differ in dtype"
        tensors = (x.shape, weight.shape), (x.dtype, weight.dtype)
        reason = _unsupported(self.supports, *tensors, self.geometry(x, *numbers), nvrtc.arch(x.device.index or 0))
        if not reason and self.nhwc and not alignment.is_nhwc(x):
            reason = "input is not channels_last and aligned"
        return reason or (self.also(x, weight) if self.also else "")

    def refusal(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *numbers: Any) -> str:
        """Why PyTorch's own convolution runs; empty when the kernels do."""
        reason = self.unsupported(x, weight, bias, *numbers)
        return reason or dispatch.refusal("", self.wins(x, weight, bias, *numbers))

    def pytorch(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *numbers: Any) -> torch.Tensor:
        """PyTorch's own convolution, in x's dtype or the one it is to be computed in."""
        stride, padding, dilation, groups, compute = self.geometry(x, *numbers)
        compute = compute or x.dtype
        bias = None if bias is None else bias.to(compute)
        x = x if x.dtype == compute else x.to(compute)
        return F.conv2d(x, weight.to(compute), bias, stride, padding, dilation, groups)

    def eager(self, *args: Any) -> torch.Tensor:
        """As `pytorch`, of what the public function takes: a bias is among it where the family has one."""
        x, weight, bias, numbers = self._split(args)
        return self.pytorch(x, weight, bias, *numbers)

    def pytorch_backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: Sequence[bool],
        *numbers: Any,
    ) -> Gradients:
        """dx, dweight and dbias, each where wanted, in PyTorch's own operation, which can be differentiated again."""
        stride, padding, dilation, groups, compute = self.geometry(x, *numbers)
        compute = compute or x.dtype
        found = torch.ops.aten.convolution_backward(
            *(dy.to(compute), x.to(compute), weight.to(compute), None if bias is None else [weight.shape[0]]),
            *([stride] * 2, list(padding), [dilation] * 2, False, [0, 0], groups),
            [wanted[0], wanted[1], bias is not None and wanted[2]],
        )
        return tuple(
            None if gradient is None or like is None else gradient.to(like.dtype)
            for gradient, like in zip(found, (x, weight, bias), strict=True)
        )

    def _made_function(self) -> type[Function]:
        convolution = self

        def forward(
            ctx: Any,
            x: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            call: Any,
            numbers: tuple[Any, ...],
            moments: bool,
        ) -> Made:
            ctx.set_materialize_grads(False)
            y, parts, *kept = convolution.forward(x, weight, bias, call, moments=moments)  # without grad mode
            Function.keep(ctx, x, weight, bias, *kept)
            ctx.call, ctx.numbers = call, numbers
            if parts is not None:
                ctx.mark_non_differentiable(parts)
            return y, parts

        def backward(ctx: Any, *gradients: torch.Tensor | None) -> Gradients:
            dy, _ = gradients
            if dy is None:  # nobody used the result
                return (None,) * 6
            x, weight, bias, *kept = Function.kept(ctx)
            wanted = ctx.needs_input_grad[:3]
            if differentiable.wanted(dy):
                found = convolution.pytorch_backward(dy, x, weight, bias, wanted, *ctx.numbers)
            else:
                found = convolution.gradients(dy, x, weight, bias, ctx.call, wanted, *kept)
            return *found, None, None, None

        made = {"forward": staticmethod(forward), "backward": staticmethod(backward), "replays": self.replays}
        return type(f"_{self.name.title().replace('_', '')}", (Function,), {"__module__": __name__, **made})

    def _split(self, args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[Any, ...]]:
        """x, weight, bias and numbers, of a torch.library operation's arguments."""
        x, weight, *rest = args
        bias = rest.pop(0) if self.biased else None
        return x, weight, bias, tuple(tuple(one) if isinstance(one, (list, tuple)) else one for one in rest)

    def _computed(self, *args: Any) -> torch.Tensor:
        x, weight, bias, numbers = self._split(args)
        x = alignment.nhwc(x) if self.nhwc else x
        call = self._taken(x, weight, bias, numbers)
        if call is None:
            y = self.pytorch(x, weight, bias, *numbers)
        else:
            y = self.forward(x, weight, bias, call, moments=False)[0]
        return y.contiguous(memory_format=NHWC)

    def _differentiated(self, dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        """dx, dweight and, of an operation that takes a bias, dbias; empty where not wanted."""
        *args, wanted = args  # type: ignore[assignment]  # a tuple becomes a list
        x, weight, bias, numbers = self._split(args)
        x = alignment.nhwc(x.detach()) if self.nhwc else x.detach()
        if self.refusal(x, weight, bias, *numbers):
            found = self.pytorch_backward(dy, x, weight, bias, wanted, *numbers)
        else:
            found = self.gradients(dy, x, weight, bias, self.call(x, weight, bias, *numbers), wanted)
        formats = NHWC, self.weight_format, torch.contiguous_format
        return tuple(
            _laid(gradient, like, layout) if want and gradient is not None else weight.new_empty(0)
            for gradient, like, layout, want in zip(found, (x, weight, bias), formats, wanted, strict=True)
        )[: 2 + self.biased]

    def _make_operation(self) -> None:
        names = ["Tensor x", "Tensor weight", *(["Tensor? bias"] if self.biased else [])]
        given = ", ".join([*names, *([self.numbers] if self.numbers else [])])
        results = ", ".join(["Tensor"] * len(names))

        def fake(*args: Any) -> torch.Tensor:
            x, weight, _, numbers = self._split(args)
            stride, padding, dilation, _, compute = self.geometry(x, *numbers)
            rows, columns = (
                (size + 2 * pad - dilation * (taps - 1) - 1) // stride + 1
                for size, pad, taps in zip(x.shape[2:], padding, weight.shape[2:], strict=True)
            )
            return alignment.empty_nhwc((x.shape[0], weight.shape[0], rows, columns), x, compute)

        def fake_backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
            *args, wanted = args  # type: ignore[assignment]  # a tuple becomes a list
            x, weight, bias, _ = self._split(args)
            formats = NHWC, self.weight_format, torch.contiguous_format
            return tuple(
                torch.empty_like(like, memory_format=layout) if want and like is not None else weight.new_empty(0)
                for like, layout, want in zip((x, weight, bias), formats, wanted, strict=True)
            )[: 2 + self.biased]

        def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            ctx.save_for_backward(*inputs[: len(names)])
            ctx.numbers = inputs[len(names) :]

        def through(ctx: Any, dy: torch.Tensor) -> Gradients:
            tensors = ctx.saved_tensors
            wanted = [want and t is not None for want, t in zip(ctx.needs_input_grad, tensors, strict=False)]
            found = gradients(dy, *tensors, *ctx.numbers, [*wanted, False][:3])
            ours = (gradient if want else None for gradient, want in zip(found, wanted, strict=True))
            return *ours, *[None] * len(ctx.numbers)

        library = torch.library.custom_op
        schema = f"({given}) -> Tensor"
        operation = library(f"advisor::{self.name}", self._computed, mutates_args=(), schema=schema)
        operation.register_fake(fake)
        schema = f"(Tensor dy, {given}, bool[] wanted) -> ({results})"
        gradients = library(f"advisor::{self.name}_backward", self._differentiated, mutates_args=(), schema=schema)
        gradients.register_fake(fake_backward)
        operation.register_autograd(through, setup_context=setup)


def _laid(gradient: torch.Tensor, like: torch.Tensor | None, layout: torch.memory_format) -> torch.Tensor:
    """A gradient as the fake kernel says that it lies."""
    if layout != torch.preserve_format:
        return gradient.contiguous(memory_format=layout)
    assert like is not None  # who has a gradient
    return gradient if gradient.stride() == like.stride() else torch.empty_like(like).copy_(gradient)
