"""Which modules a transform of the forward works on: the roots, seen through single-device wrappers; and which weights are not its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.nn.parallel import DistributedDataParallel

from advisor.loop.training import Training
from advisor.transforms.forward import WRAPPER, ForwardStack

# Dynamo has compiled the optimizer's step for these tensors, their strides, and the hooks and settings that it has: torch 2.13 goes on
# with other strides until generated code asserts on them, and traces hooks of ours.
UPDATES_COMPILED = (
    "the script compiles its optimizer's step, which is bound to its settings, hooks and the weights' layout"
)


def targets(training: Training) -> list[torch.nn.Module]:
    """The root modules; of a wrapper of one device or one process the module inside, which it calls unchanged."""
    found: list[torch.nn.Module] = []
    for root in training.roots:
        module = unwrapped(root.module)
        if module not in found:
            found.append(module)
    return found


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """What wrappers of one device or one process hold; the module itself where it is none."""
    found: Any = module
    while of_one(found):
        found = found.module
    return found  # type: ignore[no-any-return]  # a module's attribute


def of_one(module: torch.nn.Module) -> bool:
    """Whether this is a DataParallel over one device, or a DistributedDataParallel of one process."""
    if isinstance(module, torch.nn.DataParallel):
        return len(module.device_ids or [0]) == 1
    return isinstance(module, DistributedDataParallel) and module.process_group.size() == 1


def single_process(training: Training) -> list[DistributedDataParallel]:
    """The roots that are a DistributedDataParallel of one process."""
    found = {id(root.module): root.module for root in training.roots}.values()
    return [module for module in found if isinstance(module, DistributedDataParallel) and of_one(module)]


def passed_by(wrapper: torch.nn.Module) -> bool:
    """Whether calls of this wrapper go to the module in it (single_device.py): its reducer then counts no gradients."""
    return ForwardStack.of(wrapper).get(WRAPPER) is not None


# Module → the DistributedDataParallel that `--gpus N` has put around its forward, and not into its place.
_around: WeakKeyDictionary[torch.nn.Module, ref[DistributedDataParallel]] = WeakKeyDictionary()


# What `--gpus N` trains, without its wrappers of one; and the script's own wrappers that another stands for (rewrapped.py).
_replicated: WeakSet[torch.nn.Module] = WeakSet()


def replicate(module: torch.nn.Module, ddp: DistributedDataParallel) -> None:
    """From now on `ddp` is known to stand around the module, and so around all in it: what a DataParallel holds is a target itself."""
    for inner in module.modules():
        _around[inner] = ref(ddp)
    mark_replicated(unwrapped(module))


def mark_replicated(module: torch.nn.Module) -> None:
    """The layer at this module's REPLICATED tells graphs of its backward what to send."""
    _replicated.add(module)


def is_replicated(module: torch.nn.Module) -> bool:
    """Whether something tells graphs of this module's backward what to send."""
    return module in _replicated


def data_parallel(module: torch.nn.Module) -> list[DistributedDataParallel]:
    """The module itself, those inside it (torch.compile may stand around one, or a module that also holds the loss), or one around it."""
    inside = [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
    known = _around.get(module)
    around = known() if known is not None else None
    return inside if around is None else [*inside, around]


def sharded(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether some of them are no plain tensors: as FSDP2's are, which stand for a share of the weight each."""
    return any(type(parameter.data) is not torch.Tensor for parameter in parameters)


def replicated(training: Training) -> frozenset[int]:
    """Identities of the parameters whose gradients a DistributedDataParallel sends."""
    wrappers = [wrapper for root in training.roots for wrapper in data_parallel(root.module)]
    return frozenset(id(p) for wrapper in wrappers for p in wrapper.parameters() if p.requires_grad)
