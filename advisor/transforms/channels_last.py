"""channels_last: convolution weights and the model's image inputs in NHWC, the layout tensor cores work in; those of 3-D convolutions in NDHWC.

Signals [N, C, L] become images of one row: each 1-D convolution runs as a 2-D one that reads and gives NLC (keeping_nhwc.py), and its weight
stays as it is.

The values, parameter objects and optimizer stay the same; only strides change. Loses where convolutions are grouped and on
networks of few channels, and in fp32 without TF32; so it is measured like everything else.

`x.view(n, -1)` on an NHWC feature map raises where the same call on NCHW works. While this is applied, such a view becomes the
copy that `reshape` makes; every other view is untouched. Into a copy of a weight, of its gradient or its optimizer state a script would write
in vain (`p.grad.view(-1)[mask] = 0`): one that it flattens without a gradient to come goes back to the script's own layout.

Weights under DistributedDataParallel keep theirs, and convolutions bring them to that of their input at each call. DDP lays its buckets out
once, by the weights' strides of then, and reads the sums by those of now: each gradient would be permuted, the same on all ranks. So do weights
in all trainings of several processes: what a script sends itself, a gradient to be averaged, goes as memory, and where one rank alone
flattens it (to log a norm) it would lie there in another order than in the others. So do weights that a compiled optimizer's step updates.
Sources: https://pytorch.org/tutorials/intermediate/memory_format_tutorial.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from advisor.core.profile import StepProfile
from advisor.core.units import counted, percent_text
from advisor.core.verdict import Check
from advisor.loop import layouts, ranks
from advisor.loop.training import RootModule, Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.forward import CAPTURE, INPUT_LAYOUT, ForwardStack
from advisor.transforms.graphs import calls
from advisor.transforms.keeping_nhwc import keep_nhwc
from advisor.transforms.patch import all_or_nothing, map_tensors, parameters_of, replace_attribute, tensors_in
from advisor.transforms.replay import replay
from advisor.transforms.targets import replicated, targets

_FLAT, _SOLID = (torch.nn.Conv2d, torch.nn.ConvTranspose2d), (torch.nn.Conv3d, torch.nn.ConvTranspose3d)
_LINE = (torch.nn.Conv1d,)
_CONVOLUTIONS = (*_FLAT, *_SOLID)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_FLATTENING = ("reshape", "flatten", "ravel")

_Weights = list[tuple[torch.nn.Parameter, tuple[int, ...]]]
"""Converted weights, with the strides that they had."""


class ChannelsLast(Transform):
    """Put convolution weights, what belongs to them, and inputs of their dimensions in NHWC, or NDHWC."""

    id = "channels_last"

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        sites, unmatched = [], []
        for root in training.roots:
            for name, module in root.module.named_modules():
                if isinstance(module, (*_CONVOLUTIONS, *_LINE)):
                    path = f"{root.name}.{name}" if name else root.name
                    why_not = "" if isinstance(module, _LINE) else _why_not(module)
                    if why_not:
                        unmatched.append(f"{path}: {why_not}")
                    else:
                        sites.append(path)
        if not sites:
            reason = "; ".join(unmatched[:3]) or "no convolution modules"
            return Match(applies=False, reason=reason, unmatched=tuple(unmatched))
        # Of one dimension less: images of a detector, which stacks them itself; NHWC weights then make its first convolution's output so.
        wanted = {dim - less for root in training.roots for dim in _dims(root.module) for less in (0, 1)}
        seen = (tensor for root in training.roots for tensor in tensors_in((root.args, root.kwargs)))
        if not any(tensor.dim() in wanted and tensor.is_floating_point() for tensor in seen):
            named = " or ".join(map(str, sorted(wanted)))
            return Match(
                applies=False, reason=f"no floating input of {named} dimensions was seen", unmatched=tuple(unmatched)
            )
        return Match(applies=True, sites=tuple(sites), unmatched=tuple(unmatched))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        converted: _Weights = []
        with all_or_nothing() as undo:
            undo.push(converted.clear)
            for weight in _weights(training):
                plain = weight.stride()
                converted.append((weight, plain))
                nhwc = weight.data.contiguous(memory_format=_FORMATS[weight.dim()]).stride()
                undo.push(functools.partial(_relayout, training, weight, None, plain))
                _relayout(training, weight, plain, nhwc)
            lay_back = functools.partial(_lay_back, training, converted)
            replace_attribute(undo, torch.Tensor, "view", _tolerant_view(torch.Tensor.view, lay_back))
            for name in _FLATTENING:
                replace_attribute(undo, torch.Tensor, name, _writable_view(getattr(torch.Tensor, name), lay_back))
            keep_nhwc(undo)
            for target in targets(training):
                if any(isinstance(module, _CONVOLUTIONS) for module in target.modules()):
                    stack = ForwardStack.of(target)
                    undo.push(functools.partial(stack.clear, INPUT_LAYOUT))
                    stack.set(INPUT_LAYOUT, _nhwc_inputs)
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        line = sum(isinstance(module, _LINE) for root in training.roots for module in root.module.modules())
        if line and all(_dims(root.module) <= {3} for root in training.roots):
            return Check(passed=True, detail=f"{counted(line, '1-D convolution')} read and give NLC")
        if not _weights(training, converted=True) and not _fixed(training):
            return Check(passed=False, detail="no convolution weight is NHWC")
        if after is not None and any(row.kind == "conv" and row.layout for row in after.kernels):
            rows = [row for row in after.kernels if row.kind == "conv" and row.layout]
            total = sum(row.time_us for row in rows)
            nhwc = sum(row.time_us for row in rows if row.layout == "nhwc")
            share = nhwc / total if total else 0.0
            return Check(
                passed=share > 0.5,
                detail=f"{percent_text(share)} of convolution time is on NHWC tensors",
                numbers={"nhwc_frac": share},
            )
        stacks = [ForwardStack.of(target) for target in targets(training)]
        if any(stack.get(CAPTURE) for stack in stacks):  # looking would compile the hooks in
            return Check(passed=None, detail="the model is compiled, and no trace was taken")
        try:
            with calls.paused():  # a replay runs no hooks
                seen = [nhwc for root in training.roots if root.args or root.kwargs for nhwc in nhwc_inputs_seen(root)]
        except Exception as error:  # the forward is the script's own code
            return Check(passed=None, detail=f"the forward could not be run again ({type(error).__name__}: {error})")
        if not seen:
            return Check(passed=None, detail="no convolution ran")
        return Check(
            passed=sum(seen) * 2 > len(seen),
            detail=f"{sum(seen)} of {len(seen)} convolutions have an NHWC input",
            numbers={"nhwc_inputs": float(sum(seen)), "convolutions": float(len(seen))},
        )


def in_nhwc(training: Training) -> bool:
    """Whether the script itself has put its convolutions' weights, or what it gives them, in NHWC or NDHWC."""
    weights = [
        module.weight
        for root in training.roots
        for module in root.module.modules()
        if isinstance(module, _CONVOLUTIONS) and isinstance(module.weight, torch.Tensor)
    ]
    told = [layouts.is_channels_last(w) for w in weights if layouts.is_channels_last(w) or layouts.is_nchw(w)]
    if any(told):
        return 2 * sum(told) > len(told)
    seen = (tensor for root in training.roots for tensor in tensors_in((root.args, root.kwargs)))
    return any(map(layouts.is_channels_last, seen))


def _is_nhwc(tensor: torch.Tensor) -> bool:
    return tensor.dim() in _FORMATS and tensor.is_contiguous(memory_format=_FORMATS[tensor.dim()])


def _dims(module: torch.nn.Module) -> frozenset[int]:
    """How many dimensions the inputs of its convolutions have: frames of a video that 2-D convolutions see one by one stay as they are."""
    modules = tuple(module.modules())
    by_dim = {3: _LINE, 4: _FLAT, 5: _SOLID}
    return frozenset(dim for dim, kinds in by_dim.items() if any(isinstance(m, kinds) for m in modules))


def _why_not(module: torch.nn.Module) -> str:
    weight = module.weight
    if not isinstance(weight, torch.nn.Parameter):
        return "its weight is computed (parametrization or weight norm)"
    if weight.untyped_storage().nbytes() != weight.numel() * weight.element_size():
        return "its weight is a view of a larger buffer"
    # Strides of 1x1 and depthwise weights mean both layouts at once: those convert with their input.
    return "already channels_last" if _is_nhwc(weight) and not weight.is_contiguous() else ""


def _weights(training: Training, *, converted: bool = False) -> list[torch.nn.Parameter]:
    found: dict[int, torch.nn.Parameter] = {}
    fixed = frozenset() if converted else _fixed(training)
    for root in training.roots:
        for module in root.module.modules():
            if not isinstance(module, _CONVOLUTIONS) or not isinstance(module.weight, torch.nn.Parameter):
                continue
            if id(module.weight) in fixed:
                continue
            if _is_nhwc(module.weight) if converted else not _why_not(module):
                found[id(module.weight)] = module.weight
    return list(found.values())


def _fixed(training: Training) -> frozenset[int]:
    """Identities of the parameters that keep their layout."""
    return frozenset(map(id, parameters_of(training))) if training.updates_compiled else _sent(training)


def _sent(training: Training) -> frozenset[int]:
    """Identities of the parameters that go, or whose gradients go, to other processes."""
    return frozenset(map(id, parameters_of(training))) if ranks.joined()[1] > 1 else replicated(training)


def _relayout(
    training: Training, weight: torch.nn.Parameter, old: tuple[int, ...] | None, new: tuple[int, ...]
) -> None:
    """Give `weight`, its gradient and its optimizer state the strides `new`, where they have the strides `old` (None: any).

    They must agree: the multi-tensor and fused optimizers take their fast path only then. A gradient gets a new tensor: the old one may be
    another's as well, a view of a buffer that the script sums over its processes.
    """
    for tensor in (weight, *_state(training, weight)):
        if tensor.shape == weight.shape and old in (None, tensor.stride()) and tensor.stride() != new:
            tensor.data = _with_strides(tensor, new)
    if weight.grad is not None and old in (None, weight.grad.stride()) and weight.grad.stride() != new:
        weight.grad = _with_strides(weight.grad, new)


def _state(training: Training, weight: torch.nn.Parameter) -> list[torch.Tensor]:
    """What optimizers keep of it."""
    kept = (optimizer.state[weight] for optimizer in training.optimizers if weight in optimizer.state)
    return [value for entry in kept for value in entry.values() if isinstance(value, torch.Tensor)]


def _with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A copy of `tensor` with memory of its own."""
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _nhwc_inputs(inner: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    dims = _dims(module) & _FORMATS.keys()  # a signal is turned where it is convolved

    def to_nhwc(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() not in dims or not tensor.is_floating_point():
            return tensor
        tensor = tensor.contiguous(memory_format=_FORMATS[tensor.dim()])
        if tensor.shape[1] == 1 and tensor.stride(1) != 1:
            # One channel is contiguous in both layouts, and convolutions then take it for NCHW: say which by its strides.
            batch, _, *inner_strides = tensor.contiguous().stride()
            tensor = tensor.as_strided(tensor.shape, (batch, 1, *inner_strides))
        return tensor

    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*map_tensors(args, to_nhwc), **map_tensors(kwargs, to_nhwc))

    return forward


def _tolerant_view(
    plain_view: Callable[..., torch.Tensor], lay_back: Callable[[torch.Tensor], bool]
) -> Callable[..., torch.Tensor]:
    @functools.wraps(plain_view)
    def view(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return plain_view(self, *args, **kwargs)
        except (RuntimeError, ValueError):  # ValueError from the fake tensors of a compiler
            if lay_back(self):
                return plain_view(self, *args, **kwargs)
            if _is_nhwc(self) and not self.is_contiguous():
                return plain_view(self.contiguous(), *args, **kwargs)
            raise

    return view


def _writable_view(
    plain_method: Callable[..., torch.Tensor], lay_back: Callable[[torch.Tensor], bool]
) -> Callable[..., torch.Tensor]:
    """A method that gives a view where it can, and else a copy."""

    @functools.wraps(plain_method)
    def flattened(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = plain_method(self, *args, **kwargs)
        return plain_method(self, *args, **kwargs) if _may_be_written(self, found) and lay_back(self) else found

    return flattened


def _may_be_written(tensor: torch.Tensor, flattened: torch.Tensor) -> bool:
    """Whether a script may take what is a copy for a view."""
    return _is_written_nhwc(tensor) and flattened.untyped_storage()._cdata != tensor.untyped_storage()._cdata


def _is_written_nhwc(tensor: torch.Tensor) -> bool:
    """Whether it is NHWC, and a script may write into a view of it: not while it is a leaf with a gradient to come, which torch forbids."""
    return (
        tensor.dim() in (3, 4, 5)
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.grad_fn is None
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and not tensor.is_contiguous()
        and (_is_nhwc(tensor) or _is_nhwc(tensor.unsqueeze(0)))
        and not torch._C._are_functorch_transforms_active()
    )


def _lay_back(training: Training, converted: _Weights, tensor: torch.Tensor) -> bool:
    """Where `tensor` is a converted weight, its gradient or optimizer state, or lies in the memory of one (`p.data`, `p.grad[0]`), give that
    weight and what belongs to it the layout that it had, and `tensor` its place there. Says whether it was so.
    """
    if not _is_written_nhwc(tensor):
        return False
    for weight, plain in converted:
        filters = weight.dim() - 1  # of dimensions each
        if tensor.dim() not in (filters, weight.dim()) or weight.shape[1:] != tensor.shape[tensor.dim() - filters :]:
            continue
        belongings = (weight, weight.grad, *_state(training, weight))
        owner = next((o for o in belongings if o is not None and _lies_in(tensor, o)), None)
        if owner is None:
            continue
        place = tensor.storage_offset() - owner.storage_offset()  # the same in both layouts: of whole filters
        if owner is weight.grad:
            owner.data = _with_strides(owner, plain)
        _relayout(training, weight, None, plain)
        if tensor is not owner:
            tensor.data = owner.detach().as_strided(tensor.shape, plain[weight.dim() - tensor.dim() :], place)
        return True
    return False


def _lies_in(tensor: torch.Tensor, owner: torch.Tensor) -> bool:
    """Whether it is `owner`, or some filters of it."""
    return (
        owner.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        and owner.stride()[owner.dim() - tensor.dim() :] == tensor.stride()
        and 0 <= tensor.storage_offset() - owner.storage_offset() < owner.numel()
    )


def nhwc_inputs_seen(root: RootModule) -> list[bool]:
    """Whether each convolution of `root`, in order of execution, gets an NHWC input."""
    seen: list[bool] = []

    def note(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        seen.extend(
            tensor.stride(1) == 1
            for tensor in args[:1]
            if isinstance(tensor, torch.Tensor) and tensor.dim() in _FORMATS
        )

    hooks = [m.register_forward_pre_hook(note) for m in root.module.modules() if isinstance(m, _CONVOLUTIONS)]
    try:
        replay(root)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
