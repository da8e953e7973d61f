"""Read scalars from the GPU without waiting for it.

`running_loss += loss.item()` makes the host wait in each step until the GPU has caught up, and the GPU then waits for the host.
Here a kernel writes the scalar into pinned memory behind the step, and a number to come (`deferred`) takes its place until it is printed,
compared or otherwise needed; then the host waits for what is left. The numbers are bit-equal.

Only at call sites whose source proves that the value cannot leave as anything but a plain number (`scalar_flow`): accumulated in
local names, given to the `update` of a meter whose attributes are then read as plain numbers (`meters`), or kept in a list or dictionary of
the function's own that gives none away (`containers`); in the functions that run the
step, and in the script's own that these call. A value that is only asked whether it is finite, to end the program where it is not, is
asked before the optimizer's step. Other sites are listed with the reason. What gains nothing: scripts that print the value in each step.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms import deferred
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.deferred import Deferred
from advisor.transforms.meters import Meter, read_plainly, update_lines
from advisor.transforms.patch import all_or_nothing, replace_attribute, script_frames
from advisor.transforms.scalar_flow import Flow, analyse
from advisor.transforms.source import Resolve, called, of_frame, own, own_nodes, scope_of

counts = {"deferred": 0, "waited": 0}  # calls, and waits until transforms/deferred.py had begun to count them
deferred_lines: set[str] = set()  # "file:line" of what is deferred now


class DeferSync(Transform):
    """Defer `.item()` at call sites that are proved safe. Match and apply from inside the step: they read the caller's source."""

    id = "defer_sync"

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.device.type != "cuda":
            return Match(applies=False, reason="scalars are on the host already")
        plans = plans_for(sys._getframe(1))
        sites = tuple(f"{plan.file}:{line}" for plan in plans for line in sorted(plan.calls))
        unmatched = tuple(f"{plan.file}:{line}: {why}" for plan in plans for line, why in sorted(plan.refused.items()))
        reason = "" if sites else "; ".join(unmatched[:3]) or "no .item() call in the functions that run the step"
        return Match(applies=bool(sites), reason=reason, sites=sites, unmatched=unmatched)

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        plans = plans_for(sys._getframe(1))
        sites = {(plan.code, line): plan.callers for plan in plans for line in plan.sites}
        lazy = {(plan.code, line) for plan in plans for line in plan.lazy}
        device_type = training.device.type
        plain_item, nowhere = torch.Tensor.item, frozenset[tuple[CodeType, int]]()
        counts.update(deferred=0, waited=deferred.waits())

        @functools.wraps(plain_item)
        def item(self: torch.Tensor) -> Any:
            if self.device.type == device_type:
                frame = sys._getframe(1)
                callers = sites.get((frame.f_code, frame.f_lineno), nowhere)
                above = frame.f_back
                if callers is None or (above is not None and (above.f_code, above.f_lineno) in callers):
                    try:
                        number = deferred.defer(self)
                    except (
                        RuntimeError
                    ):  # no pinned memory left, or a stream capture: the plain call says what is wrong
                        number = None
                    if number is not None:
                        counts["deferred"] += 1
                        return number
            return plain_item(self)

        with all_or_nothing() as undo:
            undo.push(deferred.decide)
            for meter in {meter.cls: meter for plan in plans for meter in plan.meters}.values():
                lazy |= {(meter.update, line) for line in update_lines(meter.update)}
                read_plainly(undo, meter.cls, meter.update)
            guards = {(plan.code, line): code for plan in plans for line, code in plan.guards.items()}
            if guards:
                _decide_before_updates(undo, training)
            undo.push(lambda: [Deferred.guards.pop(guard, None) for guard in guards])
            Deferred.guards.update(guards)
            here = {f"{code.co_filename}:{line}" for code, line in sites}
            undo.push(lambda: deferred_lines.difference_update(here))
            deferred_lines.update(here)
            undo.push(lambda: Deferred.lazy.difference_update(lazy))
            Deferred.lazy.update(lazy)
            replace_attribute(undo, torch.Tensor, "item", item)
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        count, waited = counts["deferred"], deferred.waits() - counts["waited"]
        if count == 0:
            return Check(passed=False, detail="no .item() call was deferred")
        numbers = {"deferred": float(count), "waited": float(waited)}
        # Of the lines that defer, where the trace knows them: in a step that prints, other lines wait, and for more than one number.
        if before is None or after is None or not any(site.source in deferred_lines for site in before.syncs):
            detail = f"{count} reads were deferred, {waited} of them waited for before they had come"
            return Check(passed=2 * waited <= count, detail=detail, numbers=numbers)
        waits = [
            sum(site.calls for site in profile.syncs if site.source in deferred_lines) for profile in (before, after)
        ]
        numbers |= {"waits_before": waits[0], "waits_after": waits[1]}
        return Check(
            passed=waits[1] < waits[0], detail=f"host waits a step: {waits[0]:g} → {waits[1]:g}", numbers=numbers
        )


def _decide_before_updates(undo: Undo, training: Training) -> None:
    """What passed for finite is asked again before it could change a weight."""

    def decide(*_: Any) -> None:
        deferred.decide()

    for optimizer in training.optimizers:
        undo.push(optimizer.register_step_pre_hook(decide).remove)
    for scaler in training.scalers:  # which leaves an optimizer's step out where a gradient is not finite
        plain_step = scaler.step

        def step(*args: Any, plain_step: Any = plain_step, **kwargs: Any) -> Any:
            deferred.decide()
            return plain_step(*args, **kwargs)

        replace_attribute(undo, scaler, "step", step)


@dataclass(slots=True)
class _Plan:
    """What to do in one function."""

    code: CodeType
    calls: set[int]
    sites: set[int]
    lazy: set[int]
    refused: dict[int, str]
    meters: list[Meter] = field(default_factory=list)
    guards: dict[int, CodeType] = field(default_factory=dict)
    callers: set[tuple[CodeType, int]] | None = (
        None  # which take what it returns as a deferred value; None: it returns none
    )

    @property
    def file(self) -> str:
        return self.code.co_filename


def plans_for(frame: FrameType | None) -> list[_Plan]:
    """Plans for the functions of the script on the stack, those that run the training step, and for those that they call."""
    found: dict[CodeType, _Plan] = {}
    taken: dict[CodeType, tuple[ast.Call, ...]] = {}  # calls in a function that give it a deferred value
    frames = list(script_frames(frame))
    for at, script in enumerate(frames):
        caught = any(_in_try(above) for above in frames[at + 1 :])
        for code, resolve, line in _functions(script):
            if code in found or (scope := scope_of(code)) is None:
                continue
            above = frames[at + 1] if line and at + 1 < len(frames) else None
            callers, sources = (set(), ()) if above is None else _callers(code, above)
            flow = analyse(scope, resolve, line=line, sources=taken.get(code, ()), returns=bool(callers))
            plan = _plan(code, flow, guarded=line > 0 and not caught)
            plan.callers = callers if flow.returns else None
            if flow.returns and above is not None:
                taken[above.f_code] = sources
            for meter in list(plan.meters):
                _hand_on(meter, found)
            if plan.sites or plan.refused:
                found[code] = plan
    return list(found.values())


def _callers(code: CodeType, above: FrameType) -> tuple[set[tuple[CodeType, int]], tuple[ast.Call, ...]]:
    """The lines of the function above from which this one is called, and the calls, where it takes what they give as it would a read."""
    scope = scope_of(above.f_code)
    if scope is None:
        return set(), ()
    calls = tuple(
        node
        for node in own_nodes(scope)
        if isinstance(node, ast.Call)
        and node.lineno <= above.f_lineno <= (node.end_lineno or node.lineno)
        and ast.unparse(node.func).rpartition(".")[2] == code.co_name
    )
    refused = analyse(scope, of_frame(above), sources=calls).refused if calls else {}
    if not calls or any(call.lineno in refused for call in calls):
        return set(), ()
    lines = {line for call in calls for line in range(call.lineno, (call.end_lineno or call.lineno) + 1)}
    return {(above.f_code, line) for line in lines}, calls


def _functions(script: FrameType) -> Iterator[tuple[CodeType, Resolve, int]]:
    """A running function with its line, and those that it calls, without one."""
    resolve = of_frame(script)
    yield script.f_code, resolve, script.f_lineno
    scope = scope_of(script.f_code)
    if scope is not None:
        for function, below in called(scope, resolve):
            yield function.__code__, below, 0


def _plan(code: CodeType, flow: Flow, *, guarded: bool) -> _Plan:
    """`guarded`: whether a branch that ends the program does, in whichever line it is run."""
    guards = {
        line: compile(ast.Module([branch], []), code.co_filename, "exec")
        for line, branch in flow.guards.items()
        if guarded
    }
    return _Plan(code, flow.calls, flow.sites, flow.lazy, flow.refused, flow.meters, guards)


def _hand_on(meter: Meter, found: dict[CodeType, _Plan]) -> None:
    """An `update` that hands tensors' numbers on to meters reads them itself."""
    through = meter.through
    scope = scope_of(through) if through is not None else None
    if through is None or scope is None or through in found:
        return
    lines = {
        node.lineno
        for node in own_nodes(scope)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item"
    }
    if lines:
        found[through] = _Plan(through, lines, set(lines), set(), {}, [meter])


def _in_try(frame: FrameType) -> bool:
    """Whether the line that runs there is inside a `try` of the script's own, which may catch what ends the program."""
    scope = scope_of(frame.f_code) if own(frame.f_code) else None
    return scope is not None and any(
        isinstance(node, ast.Try) and node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno)
        for node in own_nodes(scope)
    )
