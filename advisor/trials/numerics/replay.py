"""One root's training call, run again from saved state: forward, backward, buffers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from advisor.loop.training import RootModule
from advisor.loop.values import output_tensors
from advisor.trials.measure import seed_everything
from advisor.trials.numerics.state import SavedState

# Tensors below this many values are pooled with others of their kind (batch-norm weights, biases).
SMALL = 4096
POOL = "gradients of small parameters"
# Random signs and values are the same ones everywhere. A script may have set another default device.
DRAWN_ON = torch.device("cpu")


@dataclass(slots=True, eq=False)
class ReplayedCall:
    """One root's captured training call, and how autocast stood around it."""

    root: RootModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grads: list[torch.Tensor | None]
    autocast: tuple[bool, torch.dtype]
    learns: bool = True  # it ran with gradients


@dataclass(slots=True, eq=False)
class Result:
    """Copies of what one replay left: tensors by group, and what else must agree."""

    groups: dict[str, list[torch.Tensor]]
    structure: tuple[Any, ...]
    seconds: float
    small: tuple[str, ...] = ()  # whose gradients are in `POOL`, in its order
    # Buffers of integers that it has changed. To what, rounding may decide: a histogram of the classes that are found.
    moved: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """How a replay differs from the step as the script made it.

    jitter: weights and inputs are moved by this relative amount, by signs of `seed`. rolled: the batch's samples in another order.
    lift: output gradients times this power of two, parameter gradients back down. reseed: another random state. autocast: on or off.
    """

    jitter: float = 0.0
    seed: int = 0
    reseed: int = 0
    rolled: bool = False
    lift: float = 1.0
    autocast: bool | None = None


AS_IT_WAS = Variation()


def replay(
    call: ReplayedCall,
    saved: SavedState,
    how: Variation = AS_IT_WAS,
    *,
    gradients: dict[int, torch.Tensor | None] | None = None,
) -> Result:
    """Run one root forward and backward from the saved state.

    gradients: filled with the parameters' own, by identity, as backward leaves them.
    """
    saved.restore(buffers_only=not how.jitter)
    if how.reseed:
        seed_everything(how.reseed)
    module = call.root.module
    args, kwargs = _varied(call, how)
    enabled, dtype = call.autocast
    buffers = dict(module.named_buffers())
    _synchronize(saved.device)
    start = time.perf_counter()
    args, kwargs = pytree.tree_map(_fresh, (args, kwargs))
    try:
        with (
            torch.set_grad_enabled(call.learns),
            torch.autocast(saved.device.type, dtype=dtype, enabled=enabled if how.autocast is None else how.autocast),
        ):
            output = module(*args, **kwargs)
        tensors = output_tensors(output)
        # Read as the script reads them, on its stream and at once: what is filled in later, by another stream or in
        # backward, is too late for the loss.
        outputs = [t.detach().clone() for t in tensors]
        _backward(tensors, call.grads, how.lift)
        inputs = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        groups = _grouped(module, outputs, inputs, saved, buffers, how.lift)
        _synchronize(saved.device)
        seconds = time.perf_counter() - start
        small = tuple(name for name, p in module.named_parameters() if p.requires_grad and p.numel() < SMALL)
        structure = _structure(module, output, outputs, buffers)
        return Result(groups, structure, seconds, small, frozenset(_moved(module, saved, buffers)))
    finally:
        for parameter in module.parameters():
            if gradients is not None:
                gradients[id(parameter)] = parameter.grad
            parameter.grad = None
        if how.jitter:
            saved.restore()


def _varied(call: ReplayedCall, how: Variation) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's inputs so varied, and its weights, which are varied in place."""
    args, kwargs = call.args, call.kwargs
    if how.rolled:
        args, kwargs = reordered(args, kwargs)
    if how.jitter:
        generator = torch.Generator().manual_seed(how.seed)
        args, kwargs = pytree.tree_map(lambda leaf: jittered(leaf, how.jitter, generator), (args, kwargs))
        with torch.no_grad():
            for parameter in call.root.module.parameters():
                parameter.copy_(jittered(parameter, how.jitter, generator))
    return args, kwargs


def _backward(tensors: list[torch.Tensor], grads: list[torch.Tensor | None], lift: float) -> None:
    wanted = [
        (t, g * lift if lift != 1.0 else g)
        for t, g in zip(tensors, grads, strict=False)
        if g is not None and t.requires_grad and t.shape == g.shape
    ]
    if wanted:
        torch.autograd.backward([t for t, _ in wanted], [g.to(t.dtype) for t, g in wanted])


def _structure(
    module: torch.nn.Module, output: Any, outputs: list[torch.Tensor], buffers: dict[str, torch.Tensor]
) -> tuple[Any, ...]:
    """What has to be equal, whatever the values: of outputs, of gradients, of the module's parts, and single whole numbers."""
    return (
        pytree.tree_structure(output),
        tuple((tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in output_tensors(output)),
        tuple(i for i, t in enumerate(outputs) if t.numel() == 1 and in_half(t)),
        tuple(name for name, p in module.named_parameters() if p.grad is not None and p.numel() >= SMALL),
        (
            *(id(p) for p in module.parameters()),
            *(name for name, b in module.named_buffers() if b is not buffers.get(name)),
        ),
        tuple(
            int(b) if b.numel() == 1 else 0 for b in module.buffers() if not (b.is_floating_point() or b.is_complex())
        ),
    )


def in_half(value: torch.Tensor) -> bool:
    """Whether a single value (a loss) of fp32 was rounded to half precision: bf16 or fp16 hold it, and it is no small integer."""
    if value.dtype != torch.float32 or float(value) == round(float(value)):
        return False
    return any(torch.equal(value.to(half).float(), value) for half in (torch.bfloat16, torch.float16))


def finite(result: Result) -> bool:
    """Whether all gradients are."""
    gradients = [t for g, ts in result.groups.items() if g.startswith("gradient") for t in ts]
    return all(bool(torch.isfinite(t).all()) for t in gradients)


def _grouped(
    module: torch.nn.Module,
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    saved: SavedState,
    buffers: dict[str, torch.Tensor],
    lift: float,
) -> dict[str, list[torch.Tensor]]:
    """What a step leaves, by group, in tensors of its own; `outputs` are copies already, `buffers` stood in their places before it."""
    groups: dict[str, list[torch.Tensor]] = {}
    for i, tensor in enumerate(outputs):
        groups[f"output {i}" if len(outputs) > 1 else "output"] = [tensor]
    for i, tensor in enumerate(inputs):
        if tensor.grad is not None:
            groups[f"gradient of input {i}"] = [tensor.grad.detach() / lift]
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        small = parameter.numel() < SMALL
        # A small parameter may have no gradient where its true gradient is zero (a bias that a norm cancels).
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter) if small else None
        if grad is not None and grad.layout is not torch.strided:
            grad = grad.to_dense()  # of an embedding: which rows it names, and how often, is no part of its values
        if grad is not None:
            groups.setdefault(POOL if small else f"gradient of {name}", []).append(
                grad.detach() / lift if lift != 1.0 else grad.detach().clone()
            )
    for name, buffer in module.named_buffers():
        before = saved.buffers.get(id(buffers.get(name)))
        if before is None or buffer.layout is not torch.strided:
            continue
        if (buffer.is_floating_point() or buffer.is_complex()) and buffer.shape == before[1].shape:
            owner = name.rpartition(".")[0] or type(module).__name__
            groups.setdefault(f"buffer updates of {owner}", []).append(buffer.detach() - before[1])
    return {group: [_real(tensor) for tensor in tensors] for group, tensors in groups.items()}


def _moved(module: torch.nn.Module, saved: SavedState, buffers: dict[str, torch.Tensor]) -> Iterator[str]:
    for name, buffer in module.named_buffers():
        before = saved.buffers.get(id(buffers.get(name)))
        whole = not (buffer.is_floating_point() or buffer.is_complex()) and buffer.layout is torch.strided
        if whole and before is not None and not torch.equal(buffer, before[1]):
            yield name


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor (a layer in frequency space) as its real and imaginary parts, which are compared like any other values."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def detached(leaf: Any) -> Any:
    """A tensor's values as a leaf of its own; other things as they are."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def copied(leaf: Any) -> Any:
    """A tensor's values in memory of its own; other things as they are."""
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _fresh(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # A copy: a forward that works in place on its input must find it as it was, every time.
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def reordered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The samples in another order: those of lists, as detectors take images and boxes, or the rows of all tensors."""
    inputs = (list(args), kwargs)
    counts: set[int] = set()
    pytree.tree_map(lambda node: counts.add(len(node)) if _samples(node) else None, inputs, is_leaf=_samples)
    if not counts:
        moved = pytree.tree_map(_rolled, inputs)
    else:
        moved = pytree.tree_map(lambda node: _turned(node, counts), inputs, is_leaf=_samples)
    return tuple(moved[0]), moved[1]


def _samples(node: Any) -> bool:
    """A list with an image, or a dict of what is known of one, for each sample."""
    if (type(node) is not tuple and type(node) is not list) or len(node) < 2:
        return False
    if all(type(part) is dict for part in node):
        return len({frozenset(part) for part in node}) == 1
    return all(isinstance(part, torch.Tensor) and part.dim() == 3 and part.size(0) == node[0].size(0) for part in node)


def _turned(node: Any, counts: set[int]) -> Any:
    if isinstance(node, (list, tuple)):
        return type(node)([node[-1], *node[:-1]])
    return _rolled(node) if isinstance(node, torch.Tensor) and node.dim() and node.size(0) in counts else node


def _rolled(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return leaf
    with torch.no_grad():
        # An image alone is mirrored. What is no image is as it was: a box's corners have an order.
        other = torch.roll(leaf, 1, 0) if leaf.size(0) > 1 else leaf.flip(-1) if leaf.dim() > 2 else leaf
        return torch.empty_like(leaf).copy_(other).requires_grad_(leaf.requires_grad)


def random_like(gradient: torch.Tensor) -> torch.Tensor:
    """Normal random values of the same root mean square (of a mean loss's, where it is zero), the same ones each time."""
    if gradient.is_complex():
        return torch.view_as_complex(random_like(_real(gradient).contiguous()))
    generator = torch.Generator().manual_seed(gradient.numel() % 2**31)
    row = torch.randn(8191, generator=generator, device=DRAWN_ON).to(gradient.device)
    values = row.repeat(-(-gradient.numel() // row.numel()))[: gradient.numel()].view(gradient.shape)
    rms = gradient.float().square().mean().sqrt().clamp_min(1.0 / max(1, gradient.numel()))
    return torch.empty_like(gradient).copy_(values * rms)


def jittered(leaf: Any, amount: float, generator: torch.Generator) -> Any:
    """Each value times (1 ± amount), the sign drawn from `generator` on the CPU so that it is the same everywhere."""
    if isinstance(leaf, torch.Tensor) and leaf.is_complex():
        with torch.no_grad():
            moved = torch.view_as_complex(jittered(_real(leaf).contiguous(), amount, generator))
        return moved.requires_grad_(leaf.requires_grad and leaf.is_leaf)
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.numel() == 0:
        return leaf
    with torch.no_grad():
        # Signs of a short row are enough, and far cheaper to draw and move than one for each value.
        signs = (torch.randint(0, 2, (8191,), generator=generator, dtype=torch.int8, device=DRAWN_ON) * 2 - 1).to(
            leaf.device
        )
        repeated = signs.repeat(-(-leaf.numel() // signs.numel()))[: leaf.numel()].view(leaf.shape)
        moved = leaf.double() if leaf.dtype == torch.float64 else leaf.float()
        moved = moved * (1.0 + 2.0 * amount * repeated)
        return torch.empty_like(leaf).copy_(moved).requires_grad_(leaf.requires_grad and leaf.is_leaf)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
