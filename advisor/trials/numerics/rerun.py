"""A module run again on what it was given with the change on: what it leaves as it is now."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from advisor.trials.numerics.plain import PlainStep
from advisor.trials.numerics.precision import EPSILON
from advisor.trials.numerics.replay import DRAWN_ON
from advisor.trials.numerics.seen import DROPOUTS, Layer, Seen, SeenCall

PARAMETER, BUFFER = "gradient of parameter", "buffer update"


@dataclass(slots=True, eq=False)
class Rerun:
    """A module, its calls, and the parameters whose gradients are told with it."""

    plain: PlainStep
    name: str
    module: Layer
    own: list[torch.nn.Parameter]
    seen: Seen

    @property
    def calls(self) -> list[SeenCall]:
        """In their order."""
        return self.seen.calls[self.name]

    @property
    def holds(self) -> bool:
        """Whether there are other modules inside."""
        return any(child for child, _ in self.module.named_children() if child != "parametrizations")

    @property
    def left_out(self) -> str:
        """The gradient of a bias that the norm behind takes off again: zero with the change on, and a sum of what its own backward has
        rounded in the plain step, which need not be near it (CycleGAN's first convolution in bf16, 65,536 pixels to a sum); "" for none.
        """
        bias = self.module._parameters.get("bias") if self.name in self.seen.biases and self._is_conv else None
        return next((f"{PARAMETER} {place}" for place, own in enumerate(self.own) if own is bias), "")

    @property
    def _is_conv(self) -> bool:
        return isinstance(self.module, torch.nn.modules.conv._ConvNd)

    def _with_bias(self, value: torch.Tensor) -> torch.Tensor:
        """What lies between a convolution and its norm, [N, C, ...], with the bias that was left out there; any other as it is."""
        bias = self.seen.biases.get(self.name)
        return value if bias is None else value.float() + bias.float().view(-1, *[1] * (value.dim() - 2))

    def found(self) -> dict[str, torch.Tensor]:
        """What it left with the change on, by result."""
        result: dict[str, torch.Tensor] = {}
        for number, call in enumerate(self.calls):
            assert call.output is not None
            result[f"output {number}"] = self._with_bias(call.output) if self._is_conv else call.output
            for place, value in enumerate(call.inputs):
                if isinstance(value, torch.Tensor) and place not in call.hidden:
                    result[f"gradient of its input {number}.{place}"] = call.back.get(place, torch.zeros_like(value))
            for place, (before, after) in enumerate(zip(call.buffers, call.left, strict=True)):
                result[f"{BUFFER} {number}.{place}"] = after - before
        for place, parameter in enumerate(self.own):
            gradient = self.seen.gradients[id(parameter)]
            result[f"{PARAMETER} {place}"] = (
                torch.zeros_like(parameter) if gradient is None else gradient * self.seen.scale
            )
        return result

    def results(self, seed: int = 0, half: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """What it leaves as it is now, given the same. With a seed above 0 from values that are moved by one rounding each, below 0
        with other random numbers. `half`: under autocast to that, and in the layout that it was given with the change on.
        """
        generator = torch.Generator().manual_seed(abs(seed))
        epsilon = EPSILON[self.plain.target_class] if seed > 0 else 0.0
        autocast = (True, half) if half is not None else self.plain.call.autocast
        result: dict[str, torch.Tensor] = {}
        for parameter in self.own:
            parameter.grad = None
        with _rounding(self.module, epsilon, generator), self._same_drops():
            for number, call in enumerate(self.calls):
                for buffer, before in zip(self.module.buffers(), call.buffers, strict=True):
                    buffer.data.copy_(before)
                if seed >= 0:
                    self.plain.saved.start_from(call.random)
                given = list(call.inputs) if half is not None else list(map(self._laid_out, call.inputs))
                inputs, output = self._called(call, given, autocast, epsilon, generator)
                result[f"output {number}"] = output.detach()
                for place, value in enumerate(inputs):
                    if isinstance(value, torch.Tensor) and place not in call.hidden:
                        back = torch.zeros_like(value) if value.grad is None else value.grad
                        result[f"gradient of its input {number}.{place}"] = back
                for place, (buffer, before) in enumerate(zip(self.module.buffers(), call.buffers, strict=True)):
                    result[f"{BUFFER} {number}.{place}"] = buffer.detach() - before
        for place, parameter in enumerate(self.own):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
            result[f"{PARAMETER} {place}"] = dense.detach().clone()
        return result

    def _laid_out(self, value: Any) -> Any:
        return self.plain.laid_out(value) if isinstance(value, torch.Tensor) else value

    def _called(
        self,
        call: SeenCall,
        given: list[Any],
        autocast: tuple[bool, torch.dtype],
        epsilon: float,
        generator: torch.Generator,
    ) -> tuple[list[Any], torch.Tensor]:
        enabled, dtype = autocast
        inputs = [_input(value, place in call.learns, enabled, epsilon, generator) for place, value in enumerate(given)]
        keywords = _inner(call.keywords, enabled, epsilon, generator)
        if inputs and isinstance(inputs[0], torch.Tensor) and not self._is_conv:
            inputs[0] = self._with_bias(inputs[0].detach()).requires_grad_(inputs[0].requires_grad)
        with torch.enable_grad(), torch.autocast(self.plain.saved.device.type, dtype=dtype, enabled=enabled):
            # A layer may work in place on what it is given, which no leaf nor view of one allows.
            copies = (v.clone() if isinstance(v, torch.Tensor) and v.requires_grad else v for v in inputs)
            output: torch.Tensor = self.module(*copies, **keywords)
        if call.gradient is not None and output.requires_grad:
            torch.autograd.backward([output], [moved(call.gradient.to(output.dtype), epsilon, generator)])
        return inputs, output

    @contextlib.contextmanager
    def _same_drops(self) -> Iterator[None]:
        """Dropouts inside drop what they dropped with the change on, whatever random numbers it draws: those are right or not by themselves."""
        inside = [
            (n, m)
            for n, m in self.module.named_modules()
            if n and isinstance(m, DROPOUTS) and m.training and not m.inplace
        ]
        hooks = []
        for name, module in inside:
            calls = self.seen.calls.get(f"{self.name}.{name}", [])
            if calls and all(call.output is not None for call in calls):
                hooks.append(module.register_forward_hook(_dropping(iter(calls))))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _dropping(calls: Iterator[SeenCall]) -> Callable[..., Any]:
    def hook(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        call = next(calls)
        assert call.output is not None
        kept = call.output != 0
        if 0 in call.back:
            kept = kept | (call.back[0] != 0)
        share = 1.0 - module.p
        return args[0] * kept / share if kept.shape == args[0].shape and share > 0 else output

    return hook


@contextlib.contextmanager
def _rounding(module: Layer, epsilon: float, generator: torch.Generator) -> Iterator[None]:
    """Its weights are moved by one rounding, and what comes out of each module inside."""
    if not epsilon:
        yield
        return

    def rounds(part: Layer, args: Any, output: Any) -> Any:
        return moved(output, epsilon, generator) if isinstance(output, torch.Tensor) else output

    weights = [(p, p.detach().clone()) for p in module.parameters()]
    parts = [part for part in module.modules() if part is not module and not any(part.children())]
    hooks = [part.register_forward_hook(rounds) for part in parts]
    try:
        with torch.no_grad():
            for parameter, _ in weights:
                parameter.copy_(moved(parameter, epsilon, generator))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for parameter, before in weights:
                parameter.copy_(before)


def _input(value: Any, learns: bool, autocast: bool, epsilon: float, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor):
        return _inner(value, autocast, epsilon, generator)
    return moved(_plain(value, autocast), epsilon, generator).clone().requires_grad_(learns)


def _inner(value: Any, autocast: bool, epsilon: float, generator: torch.Generator) -> Any:
    """A keyword's value, or a dict or list of tensors that a module is given as one; gradients of these are not told."""

    def leaf(tensor: Any) -> Any:
        return (
            moved(_plain(tensor, autocast), epsilon, generator).clone() if isinstance(tensor, torch.Tensor) else tensor
        )

    return pytree.tree_map(leaf, value)


def _plain(value: torch.Tensor, autocast: bool) -> torch.Tensor:
    """The value in the dtype that the plain step would have it in."""
    value = value.detach()
    half = value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half and not autocast else value


def moved(value: torch.Tensor, epsilon: float, generator: torch.Generator) -> torch.Tensor:
    """Each value times 1 ± epsilon, in fp32 at least."""
    if not epsilon or not value.is_floating_point():
        return value
    signs = (
        torch.randint(0, 2, (8191,), generator=generator, dtype=torch.int8, device=DRAWN_ON).to(value.device) * 2 - 1
    )
    repeated = signs.repeat(-(-value.numel() // signs.numel()))[: value.numel()].view(value.shape)
    return (value.float() * (1.0 + epsilon * repeated)).to(torch.promote_types(value.dtype, torch.float32))
