"""What a module and those below it hold that a CUDA graph of its forward has frozen in."""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from advisor.transforms.forward import InstalledForward, hooks_of, is_installed

Place = tuple[dict[str, Any], str]
"""An attribute: its module's dictionary, and its name."""

# What `torch.nn.Module` itself keeps, but for whether it trains.
_OF_EVERY_MODULE = vars(torch.nn.Module()).keys() - {"training"}


class Layout:
    """What a graph has frozen in, to be compared at each step: which tensors, where in memory; hooks of modules below the first;
    and attributes: numbers of a schedule (a dropout's or a norm's), or because a norm goes to evaluation, a phase's name, masks, lists.
    What advisor itself puts on a module is no attribute of it; of those below the first the layers around their forwards count.

    28 µs for 66 modules and 123 tensors on a core of an EPYC, where walking through `module.parameters()` and the like takes 138. By `is`,
    not by `id()`: that raises an audit event, and a library's hook on those (filelock has one, which torch imports) took 140 µs a step.

    Args:
        computed: attributes that each forward sets anew before it reads them.
    """

    def __init__(self, module: torch.nn.Module, computed: Collection[Place] = ()) -> None:
        modules = list(module.modules())
        held: list[Mapping[Any, Any]] = [d for m in modules for d in (m._modules, m._parameters, m._buffers)]
        held += [hooks for m in modules[1:] for hooks in hooks_of(m)]
        self._views = [d.values() for d in held]  # which follow what becomes of the dictionaries
        self._held = list(chain.from_iterable(self._views))
        # A DistributedDataParallel notes there, call by call, what it has sent: that is told elsewhere (sending.py).
        self._attributes = [vars(m) for m in modules if not isinstance(m, DistributedDataParallel)]
        anew: dict[int, set[str]] = {}
        for d, name in computed:
            anew.setdefault(id(d), set()).add(name)
        own = [
            {
                n: v
                for n, v in d.items()
                if n not in _OF_EVERY_MODULE and n not in anew.get(id(d), ()) and not is_installed(v)
            }
            for d in self._attributes
        ]
        self._loose = [
            (d, n, v)
            for d, of in zip(self._attributes, own, strict=True)
            for n, v in of.items()
            if isinstance(v, torch.Tensor)
        ]
        self._tensors = [t for t in (*self._held, *(t for *_, t in self._loose)) if isinstance(t, torch.Tensor)]
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        others = [[n for n, v in of.items() if not isinstance(v, torch.Tensor)] for of in own]
        self._names = list(filter(None, others))
        self._values = [(operator.itemgetter(*n), d) for n, d in zip(others, self._attributes, strict=True) if n]
        self._known = [_copied(read(d)) for read, d in self._values]
        # Not of the first itself: each composition has graphs of its own. What gets or loses layers has another number of attributes.
        below = [(d, d.get("forward")) for d in map(vars, modules[1:])]
        self._layered = [(d, f.composed) for d, f in below if isinstance(f, InstalledForward)]
        self._counts = list(map(len, self._attributes))

    def changed(self) -> bool:
        """Whether something was put in, taken out or moved since, or an attribute is another."""
        now = list(chain.from_iterable(self._views))
        same = len(now) == len(self._held) and all(map(operator.is_, now, self._held))
        return (
            not same or list(map(torch.Tensor.data_ptr, self._tensors)) != self._addresses or not self.same_attributes()
        )

    def same_attributes(self) -> bool:
        """Whether modules keep the attributes that they had."""
        try:
            return (
                list(map(len, self._attributes)) == self._counts
                and all(d[name] is tensor for d, name, tensor in self._loose)
                and [read(d) for read, d in self._values] == self._known
                and all(d["forward"].composed is composed for d, composed in self._layered)
            )
        except Exception:  # one is gone, or a tensor by now, or of a class that cannot be compared
            return False

    def other_attribute(self) -> str:
        """The name of an attribute that is another by now; "" where it cannot be told."""
        for (read, d), known, names in zip(self._values, self._known, self._names, strict=True):
            try:
                if read(d) == known:
                    continue
                before = known if isinstance(known, tuple) and len(names) > 1 else (known,)
                return next((n for n, old in zip(names, before, strict=False) if d[n] != old), "")
            except Exception:
                continue
        return ""


def _copied(values: Any) -> Any:
    """Attributes as they are now: of lists, dictionaries and sets what they hold."""
    if isinstance(values, tuple):
        return tuple(copy.copy(v) if type(v) in (list, dict, set) else v for v in values)
    return copy.copy(values) if type(values) in (list, dict, set) else values
