"""One declaration of a family's operation; it makes the autograd function, the torch.library operation with its fake kernel, the eager entry.

For operations that save their tensors for the backward, or of the one that they have its shape alone. All functions of a declaration take the operation's arguments in one order, that of
`forward`, from whose annotations the schema is read; `backward` takes them as one tuple.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from advisor.ops import differentiable, dispatch
from advisor.ops.function import Function

Arguments = tuple[Any, ...]
Saved = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]


@dataclass(eq=False, kw_only=True)
class Operation:
    """`advisor::<name>`, called as eager code does: by the kernels where nothing is against it, else by PyTorch's own operations.

    Attributes:
        name: of the torch.library operation.
        family: whose counters count its calls; empty where the name is the same.
        forward: the result by the kernels, or a tuple of it and what the backward needs besides the arguments. Annotated. One that takes
            `kept` too is told whether a backward may follow.
        backward: of the result's gradient, the arguments and what the forward saved: a gradient for each tensor among the arguments, None
            where there is none.
        shaped: the backward needs of the one tensor, the first argument, its shape alone, which stands in its place.
        twice: as `backward`, by operations that can be differentiated again; None: by those of `pytorch`.
        pytorch: PyTorch's own operations, differentiable to any order.
        refusal: why those run; empty when the kernels do.
        label: the call's variant, as it is counted.
        compiles: whether there is a torch.library operation.
        readable: the arguments as kernels can read them, for compiled graphs; in eager code `refusal` sees to that.
        fake: what `forward` returns, uninitialised.
        layout: memory format of the first argument's gradient. Other gradients lie as their arguments.
        function: the autograd.Function behind the eager entry.
        compiled: the torch.library operation, for graphs that Inductor compiles, where the rewrite has asked `spec.unsupported`. CUDA only.
            `advisor::<name>_backward` is its backward.
    """

    name: str
    family: str = ""
    forward: Callable[..., Any]
    backward: Callable[[torch.Tensor, Arguments, Saved], Gradients]
    shaped: bool = False
    twice: Callable[[torch.Tensor, Arguments, Saved], Gradients] | None = None
    pytorch: Callable[..., torch.Tensor]
    refusal: Callable[..., str]
    label: Callable[..., str]
    compiles: bool = True
    readable: Callable[..., Arguments] = lambda *args: args
    fake: Callable[..., Any] | None = None
    layout: Callable[..., torch.memory_format] = lambda *_: torch.channels_last
    function: type[Function] = field(init=False)
    compiled: Any = field(init=False)

    def __post_init__(self) -> None:
        self._engaged, self._fell_back = dispatch.counters(self.family or self.name)
        told = inspect.signature(self.forward)
        self._asks = "kept" in told.parameters
        schema = torch.library.infer_schema(_without_kept(self.forward, told), mutates_args=())
        parsed = torch._C.parse_schema(f"advisor::{self.name}{schema}")
        self._count, self._extras = len(parsed.arguments), len(parsed.returns) - 1
        self._at = tuple(i for i, one in enumerate(parsed.arguments) if "Tensor" in str(one.type))
        self._many = 0 if self.shaped else len(self._at)  # tensors among the arguments that the backward gets
        self.function = self._made_function()
        self.compiled = self._made_operation(schema) if self.compiles else None

    def __call__(self, *args: Any) -> torch.Tensor:
        """The eager entry."""
        reason = self.refusal(*args)
        if reason:
            self._fell_back[reason] += 1
            return self.pytorch(*args)
        self._engaged[self.label(*args)] += 1
        result: torch.Tensor = self.function.apply(*args)
        return result

    def _tensors(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([args[at] for at in self._at])

    def _filled(self, others: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """Arguments: `others` with the tensors, or what there is of them, at their places."""
        args = list(others)
        for at, tensor in zip(self._at, tensors, strict=True):
            args[at] = tensor
        return args

    def _kept(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """Of the arguments the tensors that the backward gets, and the others."""
        tensors = self._tensors(args)
        if self.shaped:
            return (), self._filled(args, [tuple(t.shape) for t in tensors])
        return tensors, self._filled(args, (None,) * self._many)

    def _arguments(self, others: Sequence[Any], tensors: Sequence[Any]) -> Arguments:
        return tuple(others if self.shaped else self._filled(others, tensors))

    def _differentiated(self, dy: torch.Tensor, args: Arguments, saved: Saved) -> Gradients:
        """The gradients by operations that can be differentiated again."""
        if self.twice is not None:
            return self.twice(dy, args, saved)
        if self.shaped:
            return differentiable.shaped(dy, self.pytorch, *args)
        tensors = self._tensors(args)
        return differentiable.gradients(lambda *given: self.pytorch(*self._filled(args, given)), dy, tensors)

    def _by_argument(self, gradients: Gradients) -> tuple[torch.Tensor | None, ...]:
        """One gradient an argument."""
        return tuple(self._filled([None] * self._count, gradients))

    def _made_function(self) -> type[Function]:
        operation = self

        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            found = (
                operation.forward(*args, kept=any(ctx.needs_input_grad))
                if operation._asks
                else operation.forward(*args)
            )
            y, *saved = found if operation._extras else (found,)
            tensors, ctx.others = operation._kept(args)
            Function.keep(ctx, *tensors, *saved)
            result: torch.Tensor = y
            return result

        def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
            (dy,) = gradients
            kept = Function.kept(ctx)
            args, saved = operation._arguments(ctx.others, kept[: operation._many]), kept[operation._many :]
            made = operation._differentiated if differentiable.wanted(dy) else operation.backward
            return operation._by_argument(made(dy, args, saved))

        made = {"forward": staticmethod(forward), "backward": staticmethod(backward), "replays": True}
        return type(f"_{self.name.title().replace('_', '')}", (Function,), {"__module__": __name__, **made})

    def _made_operation(self, schema: str) -> Any:
        given, many = schema.partition(" -> ")[0], self._many
        if self.shaped:
            given = given.replace("Tensor ", "SymInt[] ")
        kept = "".join(f", Tensor saved{number}" for number in range(self._extras))
        gradients = ", ".join(["Tensor"] * len(self._at))

        def forward(*args: Any) -> Any:
            args = self.readable(*map(_tupled, args))
            self._engaged[self.label(*args)] += 1
            return self.forward(*args)

        def backward(dy: torch.Tensor, *args: Any) -> Any:
            """The gradients; empty where there is no such argument."""
            args, saved = tuple(map(_tupled, args[: self._count])), args[self._count :]
            found = self.backward(dy, args if self.shaped else self.readable(*args), saved)
            made = tuple(dy.new_empty(0) if gradient is None else gradient for gradient in found)
            return made[0] if self.shaped else made

        def fake(*args: Any) -> Any:
            assert self.fake is not None  # whoever compiles has one
            return self.fake(*map(_tupled, args))

        def fake_backward(dy: torch.Tensor, *args: Any) -> Any:
            args = args[: self._count]
            x, *others = self._tensors(args)
            layout = self.layout(*args)
            if self.shaped:
                return torch.empty(x, dtype=dy.dtype, device=dy.device, memory_format=layout)
            dx = torch.empty_like(x, memory_format=layout)
            return dx, *(x.new_empty(0) if other is None else torch.empty_like(other) for other in others)

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            saved = output[1:] if self._extras else ()
            tensors, ctx.others = self._kept(inputs)
            ctx.save_for_backward(*tensors, *saved)
            if saved:
                ctx.mark_non_differentiable(*saved)

        def through(ctx: Any, dy: torch.Tensor, *_saved: Any) -> Gradients:
            tensors, saved = ctx.saved_tensors[:many], ctx.saved_tensors[many:]
            found = gradients_of(dy, *self._arguments(ctx.others, tensors), *saved)
            if self.shaped:
                return self._by_argument((found,))
            return self._by_argument(
                tuple(None if t is None else gradient for t, gradient in zip(tensors, found, strict=True))
            )

        operation = torch.library.custom_op(f"advisor::{self.name}", forward, mutates_args=(), schema=schema)
        operation.register_fake(fake)
        backward_schema = f"(Tensor dy, {given[1:-1]}{kept}) -> {gradients if self.shaped else f'({gradients})'}"
        gradients_of = torch.library.custom_op(
            f"advisor::{self.name}_backward", backward, mutates_args=(), schema=backward_schema
        )
        gradients_of.register_fake(fake_backward)
        operation.register_autograd(through, setup_context=setup)
        return operation


def _tupled(argument: Any) -> Any:
    """torch.library passes numbers in lists, which no table could have for a key."""
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument


def _without_kept(forward: Callable[..., Any], told: inspect.Signature) -> Callable[..., Any]:
    """What stands for `forward` where its schema is read."""

    @wraps(forward)
    def shown(*args: Any) -> Any:
        return forward(*args)

    shown.__signature__ = told.replace(parameters=[one for name, one in told.parameters.items() if name != "kept"])  # type: ignore[attr-defined]  # inspect reads it
    return shown
