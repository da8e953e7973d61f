"""One declaration of a family's operation; it makes the autograd function, the torch.library operation with its fake kernel, the eager entry.

All functions of a declaration take the operation's arguments in one order, that of `forward`, from whose annotations the schema is read;
`backward` takes them as one tuple. One argument may be a record, a NamedTuple with tensors: callers, autograd and torch.library pass its
fields one by one, and the declaration's functions are given the record.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch

from advisor.ops import differentiable, dispatch
from advisor.ops.function import Function

Arguments = tuple[Any, ...]
Saved = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]

# What the gradient of a tensor is: made for it, the result's, that of the first tensor, or none.
OWN, ABOVE, FIRST, NONE = "own", "above", "first", "none"


class Unread(NamedTuple):
    """In place of a tensor whose values the backward does not read, and which is not kept for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def shape_alone(*_arguments: Any) -> tuple[bool, ...]:
    """`reads` of an operation whose backward reads nothing of its one tensor."""
    return (False,)


@dataclass(eq=False, kw_only=True)
class Operation:
    """`advisor::<name>`, called as eager code does: by the kernels where nothing is against it, else by PyTorch's own operations.

    Attributes:
        name: of the torch.library operation.
        family: whose counters count its calls; empty where the name is the same.
        forward: the result by the kernels, or a tuple of it and what the backward needs besides the arguments. Annotated. One that takes
            `kept` too is told whether a backward may follow. It may write over its first argument and give that out, and may change
            what has no gradient (running statistics).
        results: how many results `forward` has, before what is kept. Of more than one those that are None are left out, and `backward` gets
            a tuple of gradients, None for those of results that nobody used.
        pure: as `forward`, without side effects and with one result: what the torch.library operation runs, where that is another. Its
            parameters are the first of `forward`'s; the others, which eager calls alone have, then have their defaults.
        backward: of the result's gradient, the arguments and what the forward saved: a gradient for each tensor among the arguments, None
            where there is none.
        reads: of each tensor among the arguments whether the backward reads its values. `Unread` stands in the place of the others. None: all.
        flows: of each tensor among the arguments what its gradient is, where that is not always its OWN: an operation of torch.library
            gives no tensor out twice.
        twice: as `backward`, by operations that can be differentiated again; None: by those of `pytorch`.
        pytorch: PyTorch's own operations, differentiable to any order.
        refusal: why those run; empty when the kernels do.
        label: the call's variant, as it is counted.
        compiles: whether there is a torch.library operation.
        readable: the arguments as kernels can read them, for compiled graphs; in eager code `refusal` sees to that. What the backward
            does not read is None there.
        fake: what `pure` returns, uninitialised.
        layout: memory format of the gradients of the first tensor, and of those in its shape. Other gradients lie as their arguments.
        function: the autograd.Function behind the eager entry.
        compiled: the torch.library operation, for graphs that Inductor compiles, where the rewrite has asked `spec.unsupported`. CUDA only.
            `advisor::<name>_backward` is its backward. Of what the forward kept, an empty tensor stands for None.
    """

    name: str
    family: str = ""
    forward: Callable[..., Any]
    results: int = 1
    pure: Callable[..., Any] | None = None
    backward: Callable[[Any, Arguments, Saved], Gradients]
    reads: Callable[..., Sequence[bool]] | None = None
    flows: Callable[..., Sequence[str]] | None = None
    twice: Callable[[Any, Arguments, Saved], Gradients] | None = None
    pytorch: Callable[..., Any]
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
        told = _spread(self.forward).parameters
        self._asks = "kept" in told
        given = [one for one in told.values() if one.kind is not one.KEYWORD_ONLY]
        self._count, self._defaults = len(given), tuple(one.default for one in given)
        self._at = tuple(i for i, one in enumerate(given) if "Tensor" in str(one.annotation))
        if self.compiles:
            self._schema = torch.library.infer_schema(_by_place(self.pure or self.forward), mutates_args=())
        if (record := _record(self.forward)) is not None:
            self._take(*record)
        self.function = self._made_function()
        self.compiled = self._made_operation() if self.compiles else None

    def _take(self, at: int, record: type[Any]) -> None:
        """Have the declaration's functions take a record, the argument `at`, in the place of its fields."""
        end = at + len(record._fields)

        def packed(args: Sequence[Any]) -> Arguments:
            return (*args[:at], record._make(args[at:end]), *args[end:])

        def whole(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **named: function(*packed(args), **named)

        for name in ("forward", "pure", "reads", "flows", "pytorch", "refusal", "label", "fake", "layout"):
            if (function := getattr(self, name)) is not None:
                setattr(self, name, whole(function))
        for name in ("backward", "twice"):
            if (function := getattr(self, name)) is not None:
                setattr(self, name, lambda dy, args, saved, function=function: function(dy, packed(args), saved))
        read = whole(self.readable)
        self.readable = lambda *args: (*(found := read(*args))[:at], *found[at], *found[at + 1 :])

    def __call__(self, *args: Any) -> torch.Tensor:
        """The eager entry; where the arguments ask for several results, it gives a tuple of them."""
        reason = self.refusal(*args)
        if reason:
            self._fell_back[reason] += 1
        result: torch.Tensor = self.pytorch(*args) if reason else self.taken(*args)
        return result

    def taken(self, *args: Any) -> Any:
        """By the kernels, which can take it."""
        self._engaged[self.label(*args)] += 1
        return self.function.apply(*args)

    def _tensors(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([args[at] for at in self._at])

    def _filled(self, others: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """Arguments: `others` with the tensors, or what there is of them, at their places."""
        args = list(others)
        for at, tensor in zip(self._at, tensors, strict=True):
            args[at] = tensor
        return args

    def _kept(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """Of the arguments the tensors that the backward reads, and the others."""
        tensors = self._tensors(args)
        if self.reads is None:
            return tensors, self._filled(args, (None,) * len(tensors))
        read = self.reads(*args)
        left = [None if is_read or t is None else _unread(t) for t, is_read in zip(tensors, read, strict=True)]
        return tuple([t if is_read else None for t, is_read in zip(tensors, read, strict=True)]), self._filled(
            args, left
        )

    def _arguments(self, others: Sequence[Any], tensors: Sequence[Any]) -> Arguments:
        args = list(others)
        for at, tensor in zip(self._at, tensors, strict=True):
            if tensor is not None:
                args[at] = tensor
        return tuple(args)

    def _differentiated(self, dy: Any, args: Arguments, saved: Saved) -> Gradients:
        """The gradients by operations that can be differentiated again."""
        if self.twice is not None:
            return self.twice(dy, args, saved)
        tensors = self._tensors(args)
        return differentiable.gradients(lambda *given: self.pytorch(*self._filled(args, given)), dy, tensors)

    def _by_argument(self, gradients: Gradients) -> tuple[torch.Tensor | None, ...]:
        """One gradient an argument."""
        return tuple(self._filled([None] * self._count, gradients))

    def _made_function(self) -> type[Function]:
        operation, many, results = self, len(self._at), self.results

        def forward(ctx: Any, *args: Any) -> Any:
            kept = {"kept": any(ctx.needs_input_grad)} if operation._asks else {}
            found = operation.forward(*args, **kept)
            made = found if isinstance(found, tuple) else (found,)
            tensors, ctx.others = operation._kept(args)
            Function.keep(ctx, *tensors, *made[results:])
            if made[0] is args[0]:
                ctx.mark_dirty(made[0])
            if results == 1:
                return made[0]
            ctx.set_materialize_grads(False)
            there = tuple([y for y in made[:results] if y is not None])
            return there if len(there) > 1 else there[0]

        def backward(ctx: Any, *gradients: torch.Tensor | None) -> Gradients:
            dy = next((one for one in gradients if one is not None), None)
            if dy is None:  # nobody used the results
                return (None,) * operation._count
            kept = Function.kept(ctx)
            args, saved = operation._arguments(ctx.others, kept[:many]), kept[many:]
            made = operation._differentiated if differentiable.wanted(dy) else operation.backward
            return operation._by_argument(made(dy if results == 1 else gradients, args, saved))

        made = {"forward": staticmethod(forward), "backward": staticmethod(backward), "replays": True}
        return type(f"_{self.name.title().replace('_', '')}", (Function,), {"__module__": __name__, **made})

    # ---- for compiled graphs

    def _whole(self, args: Sequence[Any]) -> Arguments:
        """What torch.library passes, with what eager calls alone can say. It passes numbers in lists, which no table could have for a key."""
        given = tuple([tuple(one) if isinstance(one, (list, tuple)) else one for one in args])
        return given + self._defaults[len(given) :]

    def _read(self, args: Arguments) -> Arguments:
        """`readable`, of arguments some of which are `Unread`."""
        found = self.readable(*(None if isinstance(one, Unread) else one for one in args))
        return tuple([one if isinstance(one, Unread) else read for one, read in zip(args, found, strict=True)])

    def _spelled(self, args: Sequence[Any]) -> list[Any]:
        """As the backward's operation takes them: in the place of a tensor itself, its shape and its dtype, as far as they are told."""
        found: list[Any] = []
        for at, one in enumerate(args):
            if self.reads is None or at not in self._at:
                found.append(one)
            else:
                found += [None, *one] if isinstance(one, Unread) else [one, None, None]
        return found

    def _told(self, spelled: Sequence[Any], count: int) -> tuple[Arguments, Saved]:
        """The first `count` arguments, with what eager calls alone can say, and what the forward saved, of the backward's operation."""
        rest, found = list(spelled), []
        for at in range(count):
            one = rest.pop(0)
            if self.reads is not None and at in self._at:
                shape, dtype = rest.pop(0), rest.pop(0)
                one = one if shape is None else Unread(tuple(shape), dtype)
            elif isinstance(one, (list, tuple)):
                one = tuple(one)
            found.append(one)
        return (*found, *self._defaults[count:]), tuple(rest)

    def _flow(self, args: Arguments) -> list[str]:
        tensors = self._tensors(args)
        found = (OWN,) * len(tensors) if self.flows is None else self.flows(*args)
        return [NONE if t is None else flow for t, flow in zip(tensors, found, strict=True)]

    def _made_operation(self) -> Any:
        pure = self.pure or self.forward
        schema = self._schema
        parsed = torch._C.parse_schema(f"advisor::{self.name}{schema}")
        count, extras = len(parsed.arguments), len(parsed.returns) - 1

        def forward(*args: Any) -> Any:
            whole = self.readable(*self._whole(args))
            self._engaged[self.label(*whole)] += 1
            found = pure(*whole[:count])
            if not extras:
                return found
            return tuple([found[0].new_empty(0, dtype=torch.uint8) if one is None else one for one in found])

        def fake(*args: Any) -> Any:
            assert self.fake is not None  # whoever compiles has one
            return self.fake(*self._whole(args)[:count])

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            saved = output[1:] if extras else ()
            tensors, ctx.others = self._kept(self._whole(inputs))
            ctx.save_for_backward(*tensors, *saved)
            if saved:
                ctx.mark_non_differentiable(*saved)

        def through(ctx: Any, dy: torch.Tensor, *_saved: Any) -> Gradients:
            tensors, saved = ctx.saved_tensors[: len(self._at)], ctx.saved_tensors[len(self._at) :]
            args = self._arguments(ctx.others, tensors)
            found = gradients_of(dy, *self._spelled(args[:count]), *saved)
            found = (found,) if isinstance(found, torch.Tensor) else found
            every = {ABOVE: dy, FIRST: found[0], NONE: None}
            flows = self._flow(args)[: len(found)]
            return tuple(
                self._filled(
                    [None] * self._count,
                    [
                        *(every.get(flow, one) for flow, one in zip(flows, found, strict=True)),
                        *[None] * (len(self._at) - len(found)),
                    ],
                )[:count]
            )

        operation = torch.library.custom_op(f"advisor::{self.name}", forward, mutates_args=(), schema=schema)
        operation.register_fake(fake)
        gradients_of = self._made_backward(schema.partition(" -> ")[0], count, extras)
        operation.register_autograd(through, setup_context=setup)
        return operation

    def _made_backward(self, given: str, count: int, extras: int) -> Any:
        """The backward's operation, behind a forward that is given so many arguments and keeps so many tensors."""
        many = sum(at < count for at in self._at)

        def made(dy: torch.Tensor, found: Sequence[torch.Tensor | None], args: Arguments) -> Any:
            """The gradients; empty where there is none of its own."""
            flows = self._flow(args)[:many]
            own = tuple(
                dy.new_empty(0) if one is None or flow != OWN else one
                for one, flow in zip(found[:many], flows, strict=True)
            )
            return own if many > 1 else own[0]

        def backward(dy: torch.Tensor, *spelled: Any) -> Any:
            args, saved = self._told(spelled, count)
            return made(dy, self.backward(dy if self.results == 1 else (dy,), self._read(args), saved), args)

        def fake(dy: torch.Tensor, *spelled: Any) -> Any:
            args, _ = self._told(spelled, count)
            tensors, layout = self._tensors(args), self.layout(*args)
            like = tuple(tensors[0].shape)
            found = [
                None if t is None else _like(t, dy, layout if tuple(t.shape) == like else torch.preserve_format)
                for t in tensors
            ]
            return made(dy, found, args)

        if self.reads is not None:
            given = re.sub(r"Tensor\?? (\w+)", r"Tensor? \1, SymInt[]? \1_shape, ScalarType? \1_dtype", given)
        kept = "".join(f", Tensor saved{number}" for number in range(extras))
        schema = f"(Tensor dy, {given[1:-1]}{kept}) -> ({', '.join(['Tensor'] * many)})"
        operation = torch.library.custom_op(f"advisor::{self.name}_backward", backward, mutates_args=(), schema=schema)
        operation.register_fake(fake)
        return operation


def _unread(tensor: torch.Tensor) -> Unread:
    return Unread(tuple(tensor.shape), tensor.dtype)


def _like(tensor: torch.Tensor | Unread, near: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    """An uninitialised gradient, beside `near`."""
    if isinstance(tensor, torch.Tensor):
        return torch.empty_like(tensor, memory_format=layout)
    layout = torch.contiguous_format if layout == torch.preserve_format else layout
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=near.device, memory_format=layout)


def _by_place(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for `forward` where its schema is read: what it is told by name alone is no argument of the operation."""
    told = _spread(forward)

    @wraps(forward)
    def shown(*args: Any) -> Any:
        return forward(*args)

    given = [one for one in told.parameters.values() if one.kind is not one.KEYWORD_ONLY]
    shown.__signature__ = told.replace(parameters=given)  # type: ignore[attr-defined]  # inspect reads it
    return shown


def _record(forward: Callable[..., Any]) -> tuple[int, type[Any]] | None:
    """Which of the arguments is a record with tensors, and its class; None where none is. One of numbers alone is an argument like others."""
    known = getattr(forward, "__globals__", {})
    for at, one in enumerate(inspect.signature(forward).parameters.values()):
        found = known.get(one.annotation) if isinstance(one.annotation, str) else one.annotation
        if isinstance(found, type) and hasattr(found, "_fields") and "Tensor" in str(found.__annotations__):
            return at, found
    return None


def _spread(forward: Callable[..., Any]) -> inspect.Signature:
    """Its signature with the fields of a record in the record's place."""
    told, record = inspect.signature(forward), _record(forward)
    if record is None:
        return told
    at, of = record
    parameters = list(told.parameters.values())
    by_place, types = inspect.Parameter.POSITIONAL_OR_KEYWORD, of.__annotations__
    fields = [
        inspect.Parameter(name, by_place, annotation=getattr(types[name], "__forward_arg__", types[name]))
        for name in of._fields
    ]
    return told.replace(parameters=[*parameters[:at], *fields, *parameters[at + 1 :]])
