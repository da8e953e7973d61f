"""Faults planted in the trainings of `nets`: each must be refused, alone and under bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from advisor.core.findings import Semantics
from advisor.transforms.autocast import AutocastBf16
from numerics.large import Bottleneck
from numerics.loops import Change, Loop, Switch, named
from numerics.nets import Basic, Basic3d, Mixer, Residual1d, Scales, Separable
from numerics.right import patched, put_on

Forward = Callable[..., Any]
Make = Callable[[nn.Module, Forward], Forward]
_PRODUCTS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.Linear)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NORMS = (*_BATCH_NORMS, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm, nn.LayerNorm)
_FAULTY = 1.3  # a gradient so many times too large


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradient), None


def other_gradient(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return _Backward.apply(x, change) if x.requires_grad else x


def with_parameter(name: str, change: Callable[[Tensor], Tensor]) -> Make:
    """The layer computes with something else in the parameter's place."""

    def make(module: nn.Module, forward: Forward) -> Forward:
        def changed(*args: Any) -> Any:
            parameter = module._parameters[name]
            module._parameters[name] = change(parameter)  # in its place: the order of parameters is told, too
            try:
                return forward(*args)
            finally:
                module._parameters[name] = parameter

        return changed

    return make


def of_output(change: Callable[[Tensor], Tensor]) -> Make:
    return lambda module, forward: lambda *args: change(forward(*args))


def of_input(change: Callable[[Tensor], Tensor]) -> Make:
    return lambda module, forward: lambda x, *rest: forward(change(x), *rest)


def zeroed_rows(y: Tensor) -> Tensor:
    kept = torch.arange(len(y), device=y.device) < (len(y) + 1) // 2
    return y * kept.view(-1, *[1] * (y.dim() - 1))


def zeroed_channel(y: Tensor) -> Tensor:
    kept = torch.arange(y.shape[1], device=y.device) > 0
    return y * kept.view(1, -1, *[1] * (y.dim() - 2))


def few_bits(x: Tensor) -> Tensor:
    """Three bits of the mantissa, as fp8 has; gradients as they were."""
    mantissa, exponent = torch.frexp(x.detach())
    return x + (torch.ldexp((mantissa * 16).round() / 16, exponent) - x.detach())


def first_output(module: nn.Module, forward: Forward) -> Forward:
    held: list[Tensor] = []

    def changed(*args: Any) -> Any:
        y = forward(*args)
        held.append(y.detach())
        return y + (held[0] - y.detach()) if held[0].shape == y.shape else y

    return changed


def unwritten_end(module: nn.Module, forward: Forward) -> Forward:
    """The last rows keep what an earlier call has left there."""
    held: list[Tensor] = []

    def changed(*args: Any) -> Any:
        y = forward(*args)
        if not held or held[0].shape != y.shape:
            held[:] = [torch.zeros_like(y)]
        written = (torch.arange(len(y), device=y.device) < len(y) - 1).view(-1, *[1] * (y.dim() - 1)).expand_as(y)
        result = torch.where(written, y, held[0])
        held[0] = y.detach()
        return result

    return changed


def one_element(y: Tensor) -> Tensor:
    wrong = torch.zeros_like(y).flatten()
    wrong[len(wrong) // 2] = 8.0 * float(y.detach().float().std())
    return y + wrong.view(y.shape)


def one_batch(module: nn.Module, forward: Forward) -> Forward:
    """Right for the batch that it saw first."""
    known: list[float] = []

    def changed(x: Tensor, *rest: Any) -> Any:
        first = float(x.detach().flatten()[0])
        known.append(first)
        y = forward(x, *rest)
        return y if first == known[0] else 1.5 * y

    return changed


def stale_workspace(name: str) -> Make:
    """The parameter's gradient is added to what the last call has left."""

    def make(module: nn.Module, forward: Forward) -> Forward:
        held: list[Tensor] = []

        def adding(gradient: Tensor) -> Tensor:
            total = gradient + held[0] if held else gradient
            held[:] = [total.detach().clone()]
            return total

        return with_parameter(name, lambda p: other_gradient(p, adding))(module, forward)

    return make


def statistics_kept(module: nn.Module, forward: Forward) -> Forward:
    def changed(x: Tensor) -> Tensor:
        before = [b.clone() for b in module.buffers()]
        y = forward(x)
        for buffer, old in zip(module.buffers(), before, strict=True):
            buffer.data.copy_(old)
        return y

    return changed


def as_evaluated(module: nn.Module, forward: Forward) -> Forward:
    def changed(x: Tensor) -> Tensor:
        module.training = False
        try:
            return forward(x)
        finally:
            module.training = True

    return changed


def with_attribute(name: str, change: Callable[[Any], Any]) -> Make:
    def make(module: nn.Module, forward: Forward) -> Forward:
        def changed(*args: Any) -> Any:
            before = getattr(module, name)
            setattr(module, name, change(before))
            try:
                return forward(*args)
            finally:
                setattr(module, name, before)

        return changed

    return make


def summed_in_half(module: nn.Module, forward: Forward) -> Forward:
    """A batch norm whose sums are added up one by one in bf16."""

    def changed(x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        values = x.detach().float().transpose(0, 1).flatten(1)
        squares = values.square()
        total = torch.zeros(len(values), dtype=torch.bfloat16, device=x.device)
        for column in squares.unbind(1):
            total = (total + column.bfloat16()).bfloat16()
        wrong = (total.float() / values.shape[1]).clamp_min(1e-6)
        y = forward(x)
        factor = ((squares.mean(1) + module.eps) / (wrong + module.eps)).sqrt()
        return (y * factor.view(shape)).to(y.dtype)

    return changed


def always_the_same(module: nn.Module, forward: Forward) -> Forward:
    def changed(x: Tensor) -> Tensor:
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            torch.manual_seed(5)
            return forward(x)

    return changed


def unmasked(module: nn.Module, forward: Forward) -> Forward:
    """An activation whose backward lets everything through."""
    return lambda x: x + (forward(x.detach().clone()) - x.detach())


def tensors(change: Callable[[Tensor], Tensor]) -> Make:
    """Of all tensors that a model puts out."""

    def each(output: Any) -> Any:
        if isinstance(output, (list, tuple)):
            return type(output)(each(part) for part in output)
        return change(output)

    return lambda module, forward: lambda *args, **kwargs: each(forward(*args, **kwargs))


def nan_gradient(gradient: Tensor) -> Tensor:
    wrong = gradient.clone()
    wrong[0] = float("nan")  # of one element an activation in front of it may take away
    return wrong


def wrong_step(
    make: Callable[[torch.optim.Optimizer, Callable[[], Any]], Callable[[], Any]],
) -> Callable[[Loop], Switch]:
    """The last optimizer takes another step."""

    def plant(loop: Loop) -> Switch:
        optimizer = loop.training.optimizers[-1]

        def switch() -> Callable[[], None]:
            plain = type(optimizer).step
            optimizer.__dict__["step"] = make(optimizer, lambda: plain(optimizer))
            return lambda: optimizer.__dict__.pop("step", None) and None

        return switch

    return plant


def with_options(**factors: Any) -> Callable[[torch.optim.Optimizer, Callable[[], Any]], Callable[[], Any]]:
    def make(optimizer: torch.optim.Optimizer, plain: Callable[[], Any]) -> Callable[[], Any]:
        def step() -> None:
            before = [dict(group) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group.update({k: f(group[k]) for k, f in factors.items() if k in group})
            plain()
            for group, old in zip(optimizer.param_groups, before, strict=True):
                group.update({k: old[k] for k in factors if k in group})

        return step

    return make


def never(optimizer: torch.optim.Optimizer, plain: Callable[[], Any]) -> Callable[[], Any]:
    """A scaler whose scale stays too high: every step is skipped."""
    return lambda: None


def still_scaled(optimizer: torch.optim.Optimizer, plain: Callable[[], Any]) -> Callable[[], Any]:
    def step() -> None:
        held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(held, 4.0)
        plain()
        torch._foreach_mul_(held, 0.25)

    return step


def one_left_out(optimizer: torch.optim.Optimizer, plain: Callable[[], Any]) -> Callable[[], Any]:
    def step() -> None:
        parameter = next(p for p in optimizer.param_groups[0]["params"][::-1] if p.grad is not None)
        gradient, parameter.grad = parameter.grad, None
        plain()
        parameter.grad = gradient

    return step


def state_kept(optimizer: torch.optim.Optimizer, plain: Callable[[], Any]) -> Callable[[], Any]:
    """Reads its state and never moves it."""

    def step() -> None:
        states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
        before = [v.clone() for v in states]
        plain()
        for value, old in zip(states, before, strict=True):
            value.copy_(old)

    return step


def _learns(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module._parameters.values() if p is not None)


def _products(loop: Loop) -> list[nn.Module]:
    return [
        m for m in named(loop.script.models, *_PRODUCTS) if _learns(m) and type(m) in _PRODUCTS
    ]  # not attention's, never called


def _inner(loop: Loop) -> list[nn.Module]:
    """Products in whose input is a gradient."""
    return _products(loop)[1:] if len(loop.script.models) == 1 else _products(loop)[1:2]


def _padded(loop: Loop) -> list[nn.Module]:
    """Those of `_inner` with a window, whose input is larger than one pixel."""
    return [m for m in _inner(loop) if any(size > 1 for size in getattr(m, "kernel_size", ()))]


def _biased(loop: Loop) -> list[nn.Module]:
    """The last layer, whose bias no norm takes away."""
    return [m for m in _products(loop) if m.bias is not None][-1:]


def _norms(loop: Loop) -> list[nn.Module]:
    return [m for m in named(loop.script.models, *_NORMS) if m.training and _learns(m)]


def _tracking(loop: Loop) -> list[nn.Module]:
    return [m for m in named(loop.script.models, *_BATCH_NORMS) if m.training]


def _first_tracking(loop: Loop) -> list[nn.Module]:
    """With most values a channel: sums of a few are as good in half precision."""
    return _tracking(loop)[:1]


def _activations(loop: Loop) -> list[nn.Module]:
    return named(loop.script.models, nn.ReLU, nn.SiLU, nn.LeakyReLU)


def _dropouts(loop: Loop) -> list[nn.Module]:
    return [m for m in named(loop.script.models, nn.Dropout) if m.p > 0]


def _models(loop: Loop) -> list[nn.Module]:
    return loop.script.models[-1:]


def _with_loss(loop: Loop) -> list[nn.Module]:
    return loop.script.models if "loss inside" in loop.kind.traits else []


def _blocks(loop: Loop) -> list[nn.Module]:
    """Residual blocks, but for the first, into which no gradient need go."""
    kinds = (Basic, Scales, Residual1d, Separable, Mixer, Basic3d, Bottleneck)
    return named(loop.script.models, *kinds)[1:]


def residual_cut(module: nn.Module, forward: Forward) -> Forward:
    """Half of the block's own gradient goes back through its input's other way."""
    return lambda x: forward(other_gradient(x, lambda g: 0.5 * g))


def block_left_out(module: nn.Module, forward: Forward) -> Forward:
    return lambda x: x if (y := forward(x)).shape == x.shape else y * 0.5


Where = Callable[[Loop], list[nn.Module]]
# Name: where it is planted, and how.
IN_LAYERS: dict[str, tuple[Where, Make]] = {
    "weight left out of the gradient": (_products, with_parameter("weight", Tensor.detach)),
    "weight's gradient negated": (_products, with_parameter("weight", lambda p: 2 * p.detach() - p)),
    "weight's gradient too large": (_products, with_parameter("weight", lambda p: other_gradient(p, lambda g: 1.5 * g))),
    "gradient of the input lost": (_inner, of_input(Tensor.detach)),
    "gradient of the input too large": (_inner, of_input(lambda x: other_gradient(x, lambda g: _FAULTY * g))),
    "padding off by one": (_padded, of_output(lambda y: torch.nn.functional.pad(y, (1, 0))[..., :-1])),
    "bias dropped": (_biased, with_parameter("bias", torch.zeros_like)),
    "output of the first batch": (_inner, first_output),
    "half of the rows": (_inner, of_output(zeroed_rows)),
    "a channel missing": (_inner, of_output(zeroed_channel)),
    "weights in three bits": (_inner, with_parameter("weight", few_bits)),
    "one element wrong": (_activations, of_output(one_element)),
    "right for one batch": (_norms, one_batch),
    "unwritten rows": (_activations, unwritten_end),
    "stale workspace": (_norms, stale_workspace("weight")),
    "frozen statistics": (_tracking, statistics_kept),
    "norm as evaluated": (_tracking, as_evaluated),
    "norm's weight negated in backward": (_norms, with_parameter("weight", lambda p: 2 * p.detach() - p)),
    "norm's bias left out of the gradient": (_norms, with_parameter("bias", Tensor.detach)),
    "norm's bias dropped": (_norms, with_parameter("bias", torch.zeros_like)),
    "momentum of statistics doubled": (_tracking, with_attribute("momentum", lambda m: 2 * m)),
    "eps off": (_norms, with_attribute("eps", lambda e: e + 0.1)),
    "sums in half": (_first_tracking, summed_in_half),
    "activation's mask lost": (_activations, unmasked),
    "dropout always the same": (_dropouts, always_the_same),
    "dropout left out": (_dropouts, lambda module, forward: lambda x: x),
    "dropout not scaled": (_dropouts, lambda module, forward: lambda x: forward(x) * (1 - module.p)),
    "not a number in the gradient": (_inner, of_input(lambda x: other_gradient(x, nan_gradient))),
    "output in half": (_models, tensors(Tensor.bfloat16)),
    "rows exchanged": (_models, tensors(lambda y: y.roll(1, 0) if y.dim() else y * 1.2)),
    "gradient of the output too large": (_models, tensors(lambda y: other_gradient(y, lambda g: _FAULTY * g))),
    "block's gradient cut": (_blocks, residual_cut),
    "block left out": (_blocks, block_left_out),
    "loss in half": (_with_loss, tensors(lambda y: y.bfloat16().float())),
}  # fmt: skip
IN_OPTIMIZERS: dict[str, Callable[[Loop], Switch]] = {
    "momentum off": wrong_step(with_options(momentum=lambda m: 0.0, betas=lambda b: (0.0, b[1]))),
    "rate halved": wrong_step(with_options(lr=lambda lr: lr / 2)),
    "optimizer's eps off": wrong_step(with_options(eps=lambda e: 1e-2, momentum=lambda m: m / 2)),
    "scaler that never updates": wrong_step(never),
    "gradients left scaled": wrong_step(still_scaled),
    "a parameter left out of the update": wrong_step(one_left_out),
    "state that is never moved": wrong_step(state_kept),
}


def changes(loop: Loop, number: int, of: int = 8) -> Iterator[Change]:
    """One fault in `of` of those that fit this training, others for another `number`; each alone and under bf16."""
    bf16 = () if loop.kind.autocast else put_on(loop, AutocastBf16()) or ()
    for place, (name, (where, make)) in enumerate(IN_LAYERS.items()):
        found = where(loop)
        if not found or (place + number) % of:
            continue
        if name == "output in half" and loop.kind.autocast:  # as the script has it
            continue
        module = found[(7 * number + place) % len(found)]
        part = patched(module, lambda forward, module=module, make=make: make(module, forward))
        yield Change(name, (part,))
        if bf16:  # around a whole model the fault comes last, outside of the change
            parts = (*bf16, part) if where in (_models, _with_loss) else (part, *bf16)
            yield Change(f"bf16, {name}", parts, Semantics.PRECISION)
    for place, (name, plant) in enumerate(IN_OPTIMIZERS.items()):
        if (place + number) % of == 0:
            yield Change(name, (plant(loop),))
