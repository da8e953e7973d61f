"""numpy's booleans that modules keep are Python's while their forward is captured.

Dynamo takes one for an array, and ends its graph where a forward branches on it: CUT's generator, whose upsampling has such a flag, came out
as seven graphs and code between them, and kernels found 7 places of 47.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch


@dataclass(slots=True, eq=False)
class _Held:
    captures: int = 0  # changes that are on, in whatever order they go
    flags: list[tuple[ref[torch.nn.Module], str, Any]] = field(default_factory=list)


_held: WeakKeyDictionary[torch.nn.Module, _Held] = WeakKeyDictionary()


def hold(module: torch.nn.Module) -> None:
    """Make the flags of this module and those in it Python's, until `release` is called as often as this."""
    held = _held.setdefault(module, _Held())
    held.captures += 1
    numpy = sys.modules.get("numpy")
    if held.captures > 1 or numpy is None:
        return
    for child in module.modules():
        for name, value in list(vars(child).items()):
            if isinstance(value, numpy.bool_):
                held.flags.append((ref(child), name, value))
                vars(child)[name] = bool(value)


def release(module: torch.nn.Module) -> None:
    """Give them back as they were, where the script has not set others since."""
    held = _held.get(module)
    if held is None:
        return
    held.captures -= 1
    if held.captures:
        return
    del _held[module]
    for owner, name, value in held.flags:
        child = owner()
        if child is not None and vars(child).get(name) is bool(value):
            vars(child)[name] = value
