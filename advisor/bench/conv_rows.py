"""Writes analysis/convolution_rows.json: what the rows on file say of convolutions that stand alone, for `advisor conv` of a recorded run.

`docs/benchmarks` is no part of what is installed, and a row's name tells no geometry. So the geometry is taken from the call that PyTorch
itself gets of the case. `advisor bench ops` writes the file when it ends, and `python -m advisor.bench.dispatch_rows` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.analysis.measured_convs import FILE, SCHEMA, MeasuredConv
from advisor.bench.op_rows import key, keys
from advisor.core import storage
from advisor.ops import catalog
from advisor.ops.family import Case, Family
from advisor.profiling.inside.dtypes import dtype_name

# Whose benchmark has convolutions alone. A pointwise convolution's kernel wins by the norm beside it: it is no other way to make a product.
FAMILIES = (
    "conv3x3", "depthwise", "exact_conv", "few_channels", "fft_conv", "first_conv", "grouped", "large_depthwise",
    "strided_pointwise", "winograd",
)  # fmt: skip


class _Call(Exception):
    """A convolution's arguments, before anything is computed."""


class _Caught(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            raise _Call(args)
        return func(*args, **(kwargs or {}))


def geometry(case: Case) -> dict[str, Any]:
    """The convolution of a case as the fields of a MeasuredConv; empty where PyTorch runs none."""
    arguments = case.inputs(torch.Generator().manual_seed(0), 1)
    try:
        with _Caught(), torch.no_grad():  # type: ignore[no-untyped-call]  # torch's own, without types
            case.eager(*arguments)
    except _Call as call:
        _, weight, _, stride, _, dilation, _, _, groups = call.args[0]
        return {
            "weight": tuple(weight.shape),
            "stride": tuple(stride),
            "dilation": tuple(dilation),
            "groups": groups,
            "dtype": dtype_name(weight.dtype),
        }
    return {}


def write(files: Sequence[Path], target: Path = FILE) -> None:
    """Bring the file up to these rows, one GPU's in each of `files`."""
    alone = [(family, case) for family in catalog.FAMILIES if family.id in FAMILIES for case in _alone(family)]
    shapes = {id(case): geometry(case) for _, case in alone}
    gpus = {}
    for file in files:
        document = json.loads(file.read_text(encoding="utf-8"))
        rows = {key(row): row for row in document["rows"]}
        gpus[document["gpu"]] = [
            _of(family, case, shapes[id(case)], [rows[k] for k in keys(case)])
            for family, case in alone
            if shapes[id(case)] and all(k in rows for k in keys(case))
        ]
    storage.write_text(target, text(gpus))


def text(gpus: dict[str, list[MeasuredConv]]) -> str:
    """JSON with a line a row, so that a change is read as one."""
    blocks = []
    for gpu, rows in gpus.items():
        lines = ",\n".join(f"   {json.dumps(asdict(row))}" for row in rows)
        blocks.append(f"  {json.dumps(gpu)}: [\n{lines}\n  ]")
    inner = ",\n".join(blocks)
    return f'{{\n "schema_version": {SCHEMA},\n "gpus": {{\n{inner}\n }}\n}}\n'


def _alone(family: Family) -> Iterator[Case]:
    return (case for case in family.benchmark if case.kind and "+" not in case.name)


def _of(family: Family, case: Case, shape: dict[str, Any], rows: Sequence[dict[str, Any]]) -> MeasuredConv:
    of = {row["pass"]: row for row in rows}
    forward, backward = of["forward"], of.get("backward", {})
    return MeasuredConv(
        transform=family.transform,
        taken=not case.wins(),
        shape=case.shape,
        layout=case.layout,
        forward_us=_us(forward, "advisor_ms"),
        backward_us=_us(backward, "advisor_ms"),
        library_forward_us=_us(forward, "eager_ms"),
        library_backward_us=_us(backward, "eager_ms"),
        error=float(f"{max(row['error'] for row in rows):.2g}"),
        library_error=float(f"{max(row['baseline_error'] for row in rows):.2g}"),
        **shape,
    )


def _us(row: dict[str, Any], name: str) -> float:
    """Microseconds; 0.0 without a row."""
    return round(1e3 * row[name], 2) if row else 0.0
