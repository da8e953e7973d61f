"""`a[mask] op= number` and `a[mask] = number` without a trip to the host.

Python makes three calls of the first: `t = a[mask]`, `t op= number`, `a[mask] = t`, and how many elements `t` has only the host can tell. Where
the three follow each other in one expression nobody else sees `t`, and the whole is one pass over `a` in place.

Where the index is a slice, `t` is a view of `a`, and the last of the three writes what is there already: in a graph it is left out.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from advisor.cupy_loops.replay.calls import IN_PLACE, CupyCall, Entry, Program, same

# What may stand between the first call and the last: operands are read, and one operation is made.
_READS = frozenset(
    {
        "LOAD_FAST",
        "LOAD_CONST",
        "LOAD_ATTR",
        "LOAD_GLOBAL",
        "LOAD_NAME",
        "LOAD_DEREF",
        "LOAD_SMALL_INT",
        "LOAD_FAST_BORROW",
    }
)
_STACK = frozenset({"SWAP", "COPY", "CACHE", "NOP", "ROT_TWO", "ROT_THREE", "ROT_FOUR", "EXTENDED_ARG"})
_OPERATE = frozenset(
    {"BINARY_OP", "INPLACE_ADD", "INPLACE_SUBTRACT", "INPLACE_MULTIPLY", "INPLACE_TRUE_DIVIDE", "INPLACE_POWER"}
)
MASKED = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__"})  # that are made in one pass
FAR = 64  # calls before an assignment, in which what it assigns was got
_known: dict[tuple[CodeType, int], bool] = {}


def begins(frame: FrameType, args: tuple[Any, ...], array: Any) -> bool:
    """Whether the `__getitem__` that this frame makes is the first of the three calls."""
    if len(args) != 2 or not is_mask(args[0], args[1], array):
        return False
    key = frame.f_code, frame.f_lasti
    if key not in _known:
        _known[key] = _is_augmented(*key)
    return _known[key]


def is_mask(target: Any, index: Any, array: Any) -> bool:
    """Whether this index says of each element of `target` if it is meant."""
    return isinstance(index, array) and index.dtype.kind == "b" and index.shape == target.shape


def _is_augmented(code: CodeType, at: int) -> bool:
    steps = [step for step in dis.get_instructions(code) if step.offset >= at]
    if not steps or steps[0].opname != "BINARY_SUBSCR":
        return False
    operations = 0
    for step in steps[1:]:
        if step.opname == "STORE_SUBSCR":
            return operations == 1
        operations += step.opname in _OPERATE
        if step.opname not in _READS | _STACK | _OPERATE:
            return False
    return False


def fold(program: Program, calls: list[CupyCall], masked: Callable[[str], Callable[..., Any]]) -> None:
    """Replace the three calls, and assignments of a number under a mask, in the program of these calls.

    Args:
        masked: by the name of the operation ("" for an assignment) what does it in place, of target, mask and number.
    """
    entries = program.entries
    for number, (entry, call) in enumerate(zip(entries, calls, strict=True)):
        entry.idle = call.name == "__setitem__" and _assigns_itself(calls, number)
        if call.name == "__setitem__" and _assigns_number(call):
            entry.run, entry.how, entry.masked = masked(""), "run", ("", call.args[2])
        elif call.augmented and number + 2 < len(entries) and _three(calls, number):
            first, operation, last = entries[number : number + 3]
            others = (place for other in entries[number + 3 :] for _, place in other.arrays)
            if not operation.scalars and first.gives[0] not in others:
                _fold(first, operation, last, masked(operation.name))


def _assigns_number(call: CupyCall) -> bool:
    if len(call.args) != 3 or not isinstance(call.args[2], (int, float)):
        return False
    return is_mask(call.args[0], call.args[1], type(call.args[0]))


def _assigns_itself(calls: list[CupyCall], number: int) -> bool:
    """Whether `a[i] = t` is given the view a[i] itself, changed in place by the call before. The operand's own calls come between."""
    if number < 2 or len(calls[number].args) != 3:
        return False
    operation, (target, index, value) = calls[number - 1], calls[number].args
    if operation.name not in IN_PLACE or operation.result is not value or operation.args[0] is not value:
        return False
    got = next((call for call in reversed(calls[max(0, number - FAR) : number - 1]) if call.result is value), None)
    if got is None or got.name != "__getitem__" or got.args[0] is not target or not same(got.args[1], index):
        return False
    return value.base is not None and (value.base is target or value.base is target.base)


def _three(calls: list[CupyCall], number: int) -> bool:
    first, operation, last = calls[number : number + 3]
    return (
        operation.name in MASKED
        and operation.args[0] is first.result
        and isinstance(operation.args[1], (int, float))
        and last.name == "__setitem__"
        and last.args[0] is first.args[0]
        and last.args[1] is first.args[1]
        and last.args[2] is operation.result
    )


def _fold(first: Entry, operation: Entry, last: Entry, change: Callable[..., Any]) -> None:
    """The whole runs in the place of the last call, with the number that the operation was given."""
    number = next(value for position, value in operation.constants if position == 1)
    first.how = operation.how = "placeholder"
    last.how, last.takes, last.masked = "run", (0, 1), (operation.name, number)
    last.run = lambda target, mask: change(target, mask, number)
