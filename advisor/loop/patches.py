"""Hooks into torch that can be taken back, and the one place where a fault in a hook switches advisor off.

The rule for every hook: what the user called runs exactly once, its result and its exceptions are passed on untouched,
and what advisor does around it is guarded, so that a fault in advisor costs the profile and never the training.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from advisor.core.stderr import say

_MISSING = object()


_all: WeakSet[Patches] = WeakSet()


def _forked() -> None:
    # A forked child (a DataLoader worker) is not the training process: its hooks only pass calls on.
    for patches in list(_all):
        patches.active = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Patch:
    """One replaced attribute."""

    __slots__ = ("name", "original", "owner", "replacement")

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self.owner, self.name, self.replacement = owner, name, replacement
        self.original = vars(owner).get(name, _MISSING)
        setattr(owner, name, replacement)

    def restore(self) -> None:
        """Put the original back, unless somebody has patched over ours: then ours only passes calls on."""
        if vars(self.owner).get(self.name) is not self.replacement:
            return
        if self.original is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


class Patches:
    """All hooks of one process. `active` is False after `restore_all` or a fault: every hook then only passes calls on."""

    def __init__(self) -> None:
        self.active = True
        self.fault: BaseException | None = None
        self.on_fault: list[Callable[[BaseException], None]] = []
        self._patches: list[Patch] = []
        self._undo: list[Callable[[], None]] = []
        _all.add(self)

    def replace(self, owner: Any, name: str, replacement: Any) -> Patch:
        """Set `owner.name`; taken back by `restore` or `restore_all`."""
        patch = Patch(owner, name, replacement)
        self._patches.append(patch)
        return patch

    def undo(self, step: Callable[[], None]) -> None:
        """Add a callable that takes back a hook that is no attribute (an optimizer hook's `remove`)."""
        self._undo.append(step)

    def restore(self, patch: Patch) -> None:
        """Take one replaced attribute back."""
        if patch in self._patches:
            self._patches.remove(patch)
            patch.restore()

    def restore_all(self) -> None:
        """Take everything back, last first; safe to call twice."""
        self.active = False
        while self._patches:
            self._patches.pop().restore()
        while self._undo:
            self._undo.pop()()

    def guard(self, observe: Callable[..., None]) -> Callable[..., None]:
        """`observe`, made harmless: does nothing when inactive; an exception in it switches advisor off."""

        def guarded(*args: Any) -> None:
            if not self.active:
                return
            try:
                observe(*args)
            except Exception as error:
                self.switch_off(error)

        return guarded

    def switch_off(self, error: BaseException) -> None:
        """Take all hooks back and say why, once. The training goes on as if advisor were not there."""
        if self.fault is not None:
            return
        self.fault = error
        try:
            self.restore_all()
        except Exception as second:  # a hook that cannot be taken back passes calls on
            error = second
        where = ""
        trace = self.fault.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None:
            where = f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})"
        say(f"switched off by a fault of its own, the script goes on: {type(error).__name__}: {error}{where}")
        for listener in self.on_fault:
            try:
                listener(self.fault)
            except Exception as third:
                say(f"{type(third).__name__}: {third}")
