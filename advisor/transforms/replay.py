"""Run a root's forward once more on its latest inputs, to look at it, and leave no trace."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType
from typing import Any

import torch

from advisor.loop.training import RootModule
from advisor.transforms.patch import write

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def replay(root: RootModule, *, hooks: bool = True) -> Any:
    """The output of `root`'s forward on the arguments of its latest call, without gradients.

    Buffers, attributes, what is in those that are lists, dictionaries and the like, and random-number states are as before
    afterwards. Hooks on the root itself do not run; those on its submodules do, and what they do cannot be taken back:
    `hooks=False` passes the script's own over.
    """
    with replaying(root, hooks=hooks) as output:
        return output


@contextmanager
def replaying(root: RootModule, *, hooks: bool = True) -> Iterator[Any]:
    """As `replay`; inside, all is as the forward has left it."""
    device = next((parameter.device for parameter in root.module.parameters()), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), _kept(root.module), untuned(), torch.random.fork_rng(devices, device_type="cuda"):
        if hooks:
            yield root.module.forward(*root.args, **root.kwargs)
            return
        with _own_hooks_passed_over(root.module):
            yield root.module.forward(*root.args, **root.kwargs)


@contextmanager
def untuned() -> Iterator[None]:
    """Inside, cuDNN tries no algorithms by time, whatever the script asks for: what runs here runs a few times, in layouts that the step
    may never have. (A RepLKNet spent 17 s on that, in NHWC, whose depthwise algorithms for 31 x 31 taps are the slowest.)
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def hooked(module: torch.nn.Module) -> list[str]:
    """Names of the submodules on which the script has forward hooks; those of torch itself (`weight_norm`) do not count."""
    return [
        name
        for name, child in module.named_modules()
        if child is not module
        and any(_of_the_script(hook) for kind in _HOOKS for hook in getattr(child, kind).values())
    ]


def reached_by_hooks(module: torch.nn.Module) -> Iterator[Any]:
    """What the script's forward hooks on this module reach by a name: a list that they fill for the loss, say."""
    for hook in (hook for kind in _HOOKS for hook in getattr(module, kind).values() if _of_the_script(hook)):
        if isinstance(hook, partial):
            yield from hook.args
            yield from hook.keywords.values()
            hook = hook.func
        owner = getattr(hook, "__self__", None)
        if not isinstance(owner, torch.nn.Module):
            yield from getattr(owner, "__dict__", {}).values()
        function = getattr(hook, "__func__", hook)
        if isinstance(function, FunctionType):
            names = function.__globals__
            yield from (names[name] for name in function.__code__.co_names if name in names)
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # it is empty as long as its variable is
                    yield cell.cell_contents


def _of_the_script(hook: Any) -> bool:
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return where.partition(".")[0] not in ("torch", "advisor")


@contextmanager
def _own_hooks_passed_over(module: torch.nn.Module) -> Iterator[None]:
    saved = [(vars(child), kind, getattr(child, kind)) for child in module.modules() for kind in _HOOKS]
    for attributes, kind, found in saved:
        attributes[kind] = OrderedDict((key, hook) for key, hook in found.items() if not _of_the_script(hook))
    try:
        yield
    finally:
        for attributes, kind, found in saved:
            attributes[kind] = found


_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


@contextmanager
def _kept(module: torch.nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    containers: dict[int, tuple[Any, Any]] = {}
    for child in module.modules():
        note(vars(child), containers)  # a buffer that is given another tensor is in a dictionary there
    numpy = sys.modules.get("numpy")
    drawn = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        for container, contents in containers.values():
            put_back(container, contents)
        for buffer, value in buffers:
            write(buffer, value)
        random.setstate(drawn[0])
        if numpy is not None:
            numpy.random.set_state(drawn[1])


def note(container: Any, found: dict[int, tuple[Any, Any]]) -> None:
    """What is in the container, and in those in it: a forward may add to a list that the script reads and empties."""
    if type(container) not in _CONTAINERS or id(container) in found:
        return
    found[id(container)] = container, copy.copy(container)
    for value in list(container.values() if isinstance(container, dict) else container):
        note(value, found)


def put_back(container: Any, contents: Any) -> None:
    """The container holds again what `note` has found in it."""
    if isinstance(container, dict):  # never empty meanwhile: it may be a module's own
        for key in container.keys() - contents.keys():
            del container[key]
        container.update(contents)
        return
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(contents)
