"""A small script that repeats one operator of a run, with its shapes, dtypes and strides, without the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from advisor.core.errors import AdvisorError
from advisor.core.profile import KernelRow, StepProfile
from advisor.core.trace import Trace
from advisor.core.units import time_text

# As Kineto names them → torch's.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "bool": "bool",
    "unsigned char": "uint8",
}


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator as it was called: name, and a line of source for each argument."""

    name: str
    arguments: tuple[str, ...]


def operators(profile: StepProfile, trace: Trace) -> list[tuple[KernelRow, Operator]]:
    """What can be repeated, the longest first: `--op 1` is the first. Not what the trace lacks arguments of."""
    first: dict[tuple[str, str], int] = {}
    for i, key in enumerate(zip(trace.ops.name, trace.ops.shapes, strict=True)):
        first.setdefault(key, i)
    found: dict[tuple[str, str], tuple[KernelRow, Operator]] = {}
    for row in sorted(profile.kernels, key=lambda row: -row.time_us):
        key = (row.op, row.shapes)
        if row.op.startswith("aten::") and row.shapes and key in first and key not in found:
            arguments = _arguments(trace, first[key])
            if arguments is not None:
                found[key] = row, Operator(row.op, arguments)
    return list(found.values())


def shown(shapes: str) -> str:
    """The shapes of a row's tensors as people write them: `64×3×7×7, 64`."""
    return ", ".join("×".join(map(str, size)) for size in json.loads(shapes) if size and not isinstance(size[0], list))


def script(profile: StepProfile, trace: Trace, number: int) -> str:
    """The source of a script that repeats the operator of this row, from 1 on, and times it.

    Raises:
        AdvisorError: for a number that no operator has, or where none can be repeated.
    """
    known = operators(profile, trace)
    if not known:
        raise AdvisorError(
            "no operator of this run can be repeated: the trace holds the arguments of none",
            fix="Record the run again with `advisor profile`.",
        )
    if not 1 <= number <= len(known):
        raise AdvisorError(
            f"no operator {number}", expected=f"1 to {len(known)}", fix="`advisor repro RUN` lists them."
        )
    row, operator = known[number - 1]
    device = "cuda" if profile.environment.device == "cuda" else "cpu"
    where = f"{row.module or 'no module'} ({row.phase})" + (f", {row.source}" if row.source else "")
    return _SCRIPT.format(
        name=operator.name,
        where=where,
        time=time_text(row.time_us / max(row.calls, 1.0)),
        kernel=row.name,
        device=device,
        arguments=",\n    ".join(operator.arguments),
        call=operator.name.replace("::", "."),
    )


def _arguments(trace: Trace, i: int) -> tuple[str, ...] | None:
    """A line of source for each argument of the i-th operator: a tensor, or the value that the trace has; None where it has neither."""
    ops = trace.ops
    shapes, dtypes, strides, arguments = ops.shapes[i], ops.dtypes[i], ops.strides[i], ops.arguments[i]
    sizes: list[Any] = json.loads(shapes)
    steps: list[Any] = json.loads(strides) if strides else []
    values: list[Any] = json.loads(arguments) if arguments else []
    types = dtypes.split(",")
    found: list[str] = []
    for i, size in enumerate(sizes):
        kind = types[i] if i < len(types) else ""
        value = values[i] if i < len(values) else None
        if kind in DTYPES and not (size == [] and value is not None):
            stride = steps[i] if i < len(steps) and len(steps[i]) == len(size) else None
            found.append(f"tensor({size}, torch.{DTYPES[kind]}, {stride})")
        elif kind == "TensorList" or (size and isinstance(size[0], list)):
            shown = ", ".join(f"tensor({one}, torch.float32, None)" for one in size)
            found.append(f"[{shown}]")
        else:
            found.append(repr(value))
    if not values and any(kind in ("ScalarList", "Scalar") for kind in types):
        return None
    return tuple(found)


_SCRIPT = '''\
"""{name} as a run recorded by advisor calls it, without the model. It took {time} a call there.

At {where}. Kernel: {kernel}
"""

import time

import torch

DEVICE = "{device}"


def tensor(size, dtype, stride):
    """Random values; zeros for integers, which may be indices."""
    floating = dtype.is_floating_point
    values = torch.randn(size, device=DEVICE).to(dtype) if floating else torch.zeros(size, dtype=dtype, device=DEVICE)
    if stride is None or 0 in size or 0 in stride:
        return values
    return torch.empty_strided(size, stride, dtype=dtype, device=DEVICE).copy_(values)


ARGUMENTS = [
    {arguments},
]


def call():
    return torch.ops.{call}(*POSITIONAL, **KEYWORDS)


def by_schema(overloads):
    """The arguments by position and by keyword, as an overload that takes so many declares them; what the trace lacks is left to it."""
    for name in overloads.overloads():
        declared = getattr(overloads, name)._schema.arguments
        if len(declared) < len(ARGUMENTS) or any(a.is_out for a in declared):
            continue
        pairs = list(zip(declared, ARGUMENTS))
        positional = [value for a, value in pairs if not a.kwarg_only]
        return positional, {{a.name: value for a, value in pairs if a.kwarg_only and value is not None}}
    return ARGUMENTS, {{}}


POSITIONAL, KEYWORDS = by_schema(torch.ops.{call})


def timed(repeats=50):
    """Median time of a call, in milliseconds."""
    wait = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    times = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begin)
    return sorted(times)[repeats // 2] * 1e3


if __name__ == "__main__":
    for _ in range(5):
        call()
    print(f"{{timed():.4f}} ms a call")
'''
