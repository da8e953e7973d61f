"""Read scalars from the GPU without waiting for it.

`running_loss += loss.item()` makes the host wait in each step until the GPU has caught up, and the GPU then waits for the host.
Here a kernel writes the scalar into pinned memory behind the step, and a number to come (`deferred`) takes its place until it is printed,
compared or otherwise needed; then the host waits for what is left. The numbers are bit-equal.

Only at call sites whose source proves that the value cannot leave as anything but a plain number (`scalar_flow`): accumulated in
local names, or given to the `update` of a meter whose attributes are then read as plain numbers. Other sites are listed with the
reason. What gains nothing: scripts that print the value in each step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.profiling.training import Training
from advisor.transforms import deferred
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.deferred import Deferred, plain
from advisor.transforms.patch import all_or_nothing, replace_attribute, script_frames
from advisor.transforms.scalar_flow import analyse, lines_of, safe_update, scope_of

_counts = {"deferred": 0}
_lines: set[str] = set()  # "file:line" of what is deferred now


class DeferSync(Transform):
    """Defer `.item()` at call sites that are proved safe. Match and apply from inside the step: they read the caller's source."""

    id = "defer_sync"

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.device.type != "cuda":
            return Match(applies=False, reason="scalars are on the host already")
        plans = _plans(sys._getframe(1))
        sites = tuple(f"{plan.file}:{line}" for plan in plans for line in sorted(plan.calls))
        unmatched = tuple(f"{plan.file}:{line}: {why}" for plan in plans for line, why in sorted(plan.refused.items()))
        reason = "" if sites else "; ".join(unmatched[:3]) or "no .item() call in the functions that run the step"
        return Match(applies=bool(sites), reason=reason, sites=sites, unmatched=unmatched)

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        plans = _plans(sys._getframe(1))
        sites = {(plan.code, line) for plan in plans for line in plan.sites}
        lazy = {(plan.code, line) for plan in plans for line in plan.lazy}
        device_type = training.device.type
        plain_item = torch.Tensor.item
        _counts["deferred"] = 0

        @functools.wraps(plain_item)
        def item(self: torch.Tensor) -> Any:
            if self.device.type == device_type:
                frame = sys._getframe(1)
                if (frame.f_code, frame.f_lineno) in sites:
                    try:
                        number = deferred.defer(self)
                    except (
                        RuntimeError
                    ):  # no pinned memory left, or a stream capture: the plain call says what is wrong
                        number = None
                    if number is not None:
                        _counts["deferred"] += 1
                        return number
            return plain_item(self)

        with all_or_nothing() as undo:
            for plan in plans:
                for meter, code in plan.meters.items():
                    lines = {(code, line) for line in _update_lines(code)}
                    lazy |= lines
                    _read_plainly(undo, meter, code)
            here = {f"{code.co_filename}:{line}" for code, line in sites}
            undo.push(lambda: _lines.difference_update(here))
            _lines.update(here)
            undo.push(lambda: Deferred.lazy.difference_update(lazy))
            Deferred.lazy.update(lazy)
            replace_attribute(undo, torch.Tensor, "item", item)
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        count = _counts["deferred"]
        if count == 0:
            return Check(passed=False, detail="no .item() call was deferred")
        numbers = {"deferred": float(count)}
        # A trace that tells no lines cannot tell the waits of these from those of a step that prints.
        if before is None or after is None or (before.syncs and not any(site.source for site in before.syncs)):
            return Check(passed=True, detail=f"{count} .item() calls did not wait", numbers=numbers)
        # Of the lines that defer, where the trace knows them: in a step that prints, other lines wait, and for more than one number.
        known = any(site.source in _lines for site in before.syncs)
        waits = [
            sum(site.calls for site in profile.syncs if not known or site.source in _lines)
            for profile in (before, after)
        ]
        numbers |= {"waits_before": waits[0], "waits_after": waits[1]}
        return Check(
            passed=waits[1] < waits[0], detail=f"host waits a step: {waits[0]:g} → {waits[1]:g}", numbers=numbers
        )


@dataclass(slots=True)
class _Plan:
    """What to do in one running function."""

    code: CodeType
    calls: set[int]
    sites: set[int]
    lazy: set[int]
    refused: dict[int, str]
    meters: dict[type, CodeType] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return self.code.co_filename


def _plans(frame: FrameType | None) -> list[_Plan]:
    """Plans for the functions of the script on the stack: those that run the training step."""
    return [plan for script in script_frames(frame) if (plan := _plan(script)) is not None]


def _plan(frame: FrameType) -> _Plan | None:
    scope = scope_of(frame.f_code)
    if scope is None:
        return None
    meters: dict[str, tuple[type, CodeType]] = {}

    def meter_of(name: str) -> CodeType | str:
        owner = frame.f_locals.get(name, frame.f_globals.get(name))
        found = _update_code(owner)
        if not isinstance(found, str):
            meters[name] = (type(owner), found)
        return found

    flow = analyse(scope, meter_of)
    if not flow.sites and not flow.refused:
        return None
    chosen = {cls: code for name, (cls, code) in meters.items() if name in flow.meters}
    return _Plan(frame.f_code, flow.calls, flow.sites, flow.lazy, flow.refused, chosen)


def _update_code(owner: Any) -> CodeType | str:
    """The code of a meter's `update`, or why its values cannot be deferred."""
    cls = type(owner)
    update = vars(cls).get("update")
    if not hasattr(update, "__code__"):
        return f"{cls.__name__} has no update method of its own"
    if any("__getattribute__" in vars(base) for base in cls.__mro__[:-1]) or not hasattr(owner, "__dict__"):
        return f"{cls.__name__} handles its attributes itself"
    if any(base.__module__.partition(".")[0] == "torch" for base in cls.__mro__):
        return f"{cls.__name__} is a torch class"
    method = scope_of(update.__code__)
    if method is None:
        return f"the source of {cls.__name__}.update is not to be had"
    why_not = safe_update(method, 1)
    return f"{cls.__name__}: {why_not}" if why_not else update.__code__


def _update_lines(code: CodeType) -> set[int]:
    method = scope_of(code)
    return set().union(*(lines_of(statement) for statement in method.body)) if method is not None else set()


def _read_plainly(undo: Undo, meter: type, update: CodeType) -> None:
    """Outside its `update`, this class's attributes read as plain numbers."""
    holders: dict[int, Any] = {}
    ordinary: Callable[[Any, str], Any] = object.__getattribute__

    def __getattribute__(self: Any, name: str) -> Any:
        value = ordinary(self, name)
        if type(value) is Deferred:
            holders[id(self)] = self
            if sys._getframe(1).f_code is not update:
                value = ordinary(self, "__dict__")[name] = plain(value)
        elif name == "__dict__":
            settle(value)
        return value

    def settle(attributes: dict[str, Any]) -> None:
        attributes.update({name: plain(value) for name, value in attributes.items() if type(value) is Deferred})

    def settle_all() -> None:
        for holder in holders.values():
            settle(ordinary(holder, "__dict__"))

    undo.push(settle_all)
    replace_attribute(undo, meter, "__getattribute__", __getattribute__)
