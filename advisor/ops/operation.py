"""One declaration of a family's operation; it makes the autograd function, the torch.library operation with its fake kernel, the eager entry.

For operations that save their tensors for the backward. All functions of a declaration take the operation's arguments in one order, that of
`forward`, from whose annotations the schema is read; `backward` takes them as one tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
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
        name: also the family's, whose counters count its calls.
        forward: the result by the kernels, or a tuple of it and what the backward needs besides the arguments. Annotated.
        backward: of the result's gradient, the arguments and what the forward saved: a gradient for each tensor among the arguments, None
            where there is none.
        pytorch: PyTorch's own operations, differentiable to any order.
        refusal: why those run; empty when the kernels do.
        label: the call's variant, as it is counted.
        readable: the arguments as kernels can read them, for compiled graphs; in eager code `refusal` sees to that.
        fake: what `forward` returns, uninitialised.
        layout: memory format of the first argument's gradient. Other gradients lie as their arguments.
        function: the autograd.Function behind the eager entry.
        compiled: the torch.library operation, for graphs that Inductor compiles, where the rewrite has asked `spec.unsupported`. CUDA only.
            `advisor::<name>_backward` is its backward.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[[torch.Tensor, Arguments, Saved], Gradients]
    pytorch: Callable[..., torch.Tensor]
    refusal: Callable[..., str]
    label: Callable[..., str]
    readable: Callable[..., Arguments]
    fake: Callable[..., Any]
    layout: Callable[..., torch.memory_format]
    function: type[Function] = field(init=False)
    compiled: Any = field(init=False)

    def __post_init__(self) -> None:
        self._engaged, self._fell_back = dispatch.counters(self.name)
        schema = torch.library.infer_schema(self.forward, mutates_args=())
        parsed = torch._C.parse_schema(f"advisor::{self.name}{schema}")
        self._count, self._extras = len(parsed.arguments), len(parsed.returns) - 1
        self._at = tuple(i for i, one in enumerate(parsed.arguments) if "Tensor" in str(one.type))
        self._tensors: Callable[[Sequence[Any]], tuple[Any, ...]] = itemgetter(*self._at)
        self.function = self._made_function()
        self.compiled = self._made_operation(schema)

    def __call__(self, *args: Any) -> torch.Tensor:
        """The eager entry."""
        reason = self.refusal(*args)
        if reason:
            self._fell_back[reason] += 1
            return self.pytorch(*args)
        self._engaged[self.label(*args)] += 1
        result: torch.Tensor = self.function.apply(*args)
        return result

    def _filled(self, others: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """Arguments: `others` with the tensors at their places."""
        args = list(others)
        for at, tensor in zip(self._at, tensors, strict=True):
            args[at] = tensor
        return args

    def _by_argument(self, gradients: Gradients) -> tuple[torch.Tensor | None, ...]:
        """One gradient an argument."""
        return tuple(self._filled([None] * self._count, gradients))

    def _made_function(self) -> type[Function]:
        operation, many = self, len(self._at)

        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            found = operation.forward(*args)
            y, *saved = found if operation._extras else (found,)
            Function.keep(ctx, *operation._tensors(args), *saved)
            ctx.others = operation._filled(args, (None,) * many)
            result: torch.Tensor = y
            return result

        def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
            (dy,) = gradients
            kept = Function.kept(ctx)
            tensors, saved = kept[:many], kept[many:]
            if differentiable.wanted(dy):
                found = differentiable.gradients(
                    lambda *tensors: operation.pytorch(*operation._filled(ctx.others, tensors)), dy, tensors
                )
            else:
                found = operation.backward(dy, tuple(operation._filled(ctx.others, tensors)), saved)
            return operation._by_argument(found)

        made = {"forward": staticmethod(forward), "backward": staticmethod(backward), "replays": True}
        return type(f"_{self.name.title().replace('_', '')}", (Function,), {"__module__": __name__, **made})

    def _made_operation(self, schema: str) -> Any:
        given = schema.partition(" -> ")[0]
        kept = "".join(f", Tensor saved{number}" for number in range(self._extras))
        gradients = ", ".join(["Tensor"] * len(self._at))

        def forward(*args: Any) -> Any:
            args = self.readable(*args)
            self._engaged[self.label(*args)] += 1
            return self.forward(*args)

        def backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
            """The gradients; empty where there is no such argument."""
            args, saved = args[: self._count], args[self._count :]
            found = self.backward(dy, self.readable(*args), saved)
            return tuple(dy.new_empty(0) if gradient is None else gradient for gradient in found)

        def fake_backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
            args = args[: self._count]
            x, *others = self._tensors(args)
            dx = torch.empty_like(x, memory_format=self.layout(*args))
            return dx, *(x.new_empty(0) if other is None else torch.empty_like(other) for other in others)

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            saved = output[1:] if self._extras else ()
            ctx.save_for_backward(*self._tensors(inputs), *saved)
            if saved:
                ctx.mark_non_differentiable(*saved)
            ctx.others = self._filled(inputs, [None] * len(self._at))

        def through(ctx: Any, dy: torch.Tensor, *_saved: Any) -> Gradients:
            tensors, saved = ctx.saved_tensors[: len(self._at)], ctx.saved_tensors[len(self._at) :]
            found = gradients_of(dy, *self._filled(ctx.others, tensors), *saved)
            return self._by_argument(
                tuple(None if t is None else gradient for t, gradient in zip(tensors, found, strict=True))
            )

        operation = torch.library.custom_op(f"advisor::{self.name}", forward, mutates_args=(), schema=schema)
        operation.register_fake(self.fake)
        backward_schema = f"(Tensor dy, {given[1:-1]}{kept}) -> ({gradients})"
        gradients_of = torch.library.custom_op(
            f"advisor::{self.name}_backward", backward, mutates_args=(), schema=backward_schema
        )
        gradients_of.register_fake(fake_backward)
        operation.register_autograd(through, setup_context=setup)
        return operation
