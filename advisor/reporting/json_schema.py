"""JSON schemas (draft 2020-12) of what commands print with `--format json`: one a type of document.

python -m advisor.reporting.json_schema

writes docs/reference/json/*.schema.json and docs/reference/json.md; a test fails when they are out of date. Fields of dataclasses come
from their annotations, those of hand-made documents from the tables here. New keys may come at any time; `schema_version` rises when
one is removed or means something else.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

from advisor.analysis.convolutions import Product
from advisor.analysis.scaling import Foretold
from advisor.core.attempt import Attempt
from advisor.core.findings import Card, Findings
from advisor.core.held import MemoryLook
from advisor.core.profile import StepProfile
from advisor.core.storage import SCHEMA_VERSION
from advisor.core.verdict import TrialLog

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_NUMBER: dict[str, Any] = {"type": ["number", "null"]}  # a number that is not finite is null
_SPACE = "docs/reference"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One type of document: which commands print it, what it is, and its fields beside `schema_version` and `type`."""

    commands: tuple[str, ...]
    about: str
    fields: Mapping[str, Any]


def _fields(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


_CAUSE = {"cause": str, "label": str, "time_us": float, "frac": float, "limit_us": float | None}
_GAP = {
    "kind": str,
    "module": str,
    "layer": str,
    "modules": int,
    "op": str,
    "source": str,
    "time_us": float,
    "limit_us": float,
    "gap_us": float,
}
_SUMMARY = {
    "headline": str,
    "script": str,
    "argv": list[str],
    "step_us": float | None,
    "step_p10_us": float | None,
    "step_p90_us": float | None,
    "steps_measured": int,
    "samples_per_s": float | None,
    "limit_us": float | None,
    "limit_frac": float | None,
    "dram_bytes": float | None,
    "dram_provenance": str,
    "divided_step_us": float | None,
    "causes": [_CAUSE],
    "gaps": [_GAP],
    "fired": list[str],
    "cards": [Card],
    "kept": list[str],
    "speedup": float | None,
    "speedup_low": float | None,
    "speedup_high": float | None,
    "device_speedup": float | None,
    "device_speedup_low": float | None,
    "device_speedup_high": float | None,
    "complete": bool,
}
_GAIN = {"low": str, "high": str, "basis": str}
RULE = {
    "id": str,
    "title": str,
    "area": str,
    "severity": str,
    "status": str,
    "semantics": str,
    "requires": list[str],
    "transform": str,
    "parameters": dict[str, str],
    "gain": (_GAIN, None),
    "cause": str,
    "role": str,
    "gates": bool,
    "path": str,
}
_METRIC = {
    "name": str,
    "kind": str,
    "unit": str,
    "written": str,
    "meaning": str,
    "needs": str,
    "section": str,
    "provenance": list[str],
    "gathered": str,
    "rules": list[str],
}
_RUN = {
    "run": str,
    "script": str,
    "ended": str,
    "bytes": int,
    "holds": list[str],
    "verdict": str,
    "needed": str,
}
_DELTA = {
    "label": str,
    "unit": str,
    "a": float | None,
    "b": float | None,
    "comparable": bool,
    "more_is_better": bool,
}
_FAULT = {"path": str, "line": int | None, "column": int | None, "text": str, "found": str, "expected": str, "fix": str}

DOCUMENTS: dict[str, Document] = {
    "report": Document(
        commands=("profile", "recommend", "report", "apply"),
        about="A run: a summary, then profile, findings and trials as recorded; null for what the run does not have.",
        fields={
            "summary": (_SUMMARY, None),
            "profile": StepProfile | None,
            "findings": Findings | None,
            "trials": TrialLog | None,
        },
    ),
    "attempt": Document(
        commands=("try",),
        about="One change or one patch, tried and judged. `verdict` is `kept` for what is proved.",
        fields={**_fields(Attempt), "exit_code": int},
    ),
    "comparison": Document(
        commands=("compare",),
        about="Run B compared with run A. `ratio` is B's step time over A's, with an interval from `low` to `high`.",
        fields={
            "a": str,
            "b": str,
            "comparable": bool,
            "differences": list[str],
            "ratio": float | None,
            "low": float | None,
            "high": float | None,
            "sentence": str,
            "totals": [_DELTA],
            "kinds": [_DELTA],
        },
    ),
    "convolutions": Document(
        commands=("conv",),
        about="Each product of each convolution: its algorithm, time, rate, limit and why.",
        fields={
            "script": str,
            "settings": list[str],
            "products": [{**_fields(Product), "total_us": float, "tflops": float, "of_limit": float | None}],
        },
    ),
    "memory": Document(
        commands=("memory",),
        about="What one step holds in memory, by kind, module and line; and each module's share.",
        fields=_fields(MemoryLook),
    ),
    "scaling": Document(
        commands=("scale",),
        about="A step of several GPUs, predicted; pairs are low and high. `gpu_hours` is there with `--epochs`.",
        fields={"links": list[str], "one_us": float, "foretold": [_fields(Foretold)]},
    ),
    "runs": Document(commands=("runs",), about="The runs in advisor-runs/ here.", fields={"runs": [_RUN]}),
    "rules": Document(commands=("rules list",), about="Every rule.", fields={"rules": [RULE]}),
    "rule": Document(commands=("rules show",), about="One rule, and its page as text.", fields={**RULE, "text": str}),
    "metrics": Document(
        commands=("rules metrics",), about="What a rule may ask, and which rules do.", fields={"metrics": [_METRIC]}
    ),
    "cases": Document(
        commands=("rules test",),
        about="Each case of a rule, and whether it holds.",
        fields={"cases": [{"rule": str, "case": str, "passed": bool, "detail": str}]},
    ),
    "faults": Document(commands=("rules lint",), about="Each fault of a rule file.", fields={"faults": [_FAULT]}),
    "kernels": Document(
        commands=("kernels list",),
        about="Every bundled kernel source.",
        fields={"kernels": [{"family": str, "kernel": str, "entries": str, "replaces": str, "sha256": str}]},
    ),
    "verification": Document(
        commands=("kernels verify",),
        about="Each case of a kernel against its fp64 reference. `passed` is null for what PyTorch does itself here.",
        fields={"verification": [{"family": str, "case": str, "passed": bool | None, "detail": str}]},
    ),
    "checks": Document(
        commands=("doctor",),
        about="What can be measured on this machine. `status` is ok, warn or fail.",
        fields={"checks": [{"name": str, "status": str, "found": str, "fix": str}]},
    ),
    "error": Document(
        commands=("every command",),
        about="In place of the result, when a command fails before it has one. The exit code is the process's too.",
        fields={"text": str, "found": str, "expected": str, "fix": str, "exit_code": int},
    ),
}


def schema(name: str) -> dict[str, Any]:
    """The schema of a type of document."""
    document = DOCUMENTS[name]
    defs: dict[str, Any] = {}
    body = _object(document.fields, defs)
    head = {"schema_version": {"const": SCHEMA_VERSION}, "type": {"const": name}}
    return {
        "$schema": DRAFT,
        "title": f"advisor {name}, version {SCHEMA_VERSION}",
        "description": document.about,
        "type": "object",
        "properties": {**head, **body["properties"]},
        "required": [*head, *body["required"]],
        **({"$defs": dict(sorted(defs.items()))} if defs else {}),
    }


def _object(fields: Mapping[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: _of(kind, defs) for name, kind in fields.items()},
        "required": list(fields),
    }


def _of(kind: Any, defs: dict[str, Any]) -> dict[str, Any]:
    if kind is Any:
        return {}
    if isinstance(kind, Mapping):
        return _object(kind, defs)
    if isinstance(kind, list):  # [x]: a list of those
        return {"type": "array", "items": _of(kind[0], defs)}
    if isinstance(kind, tuple):  # (x, None): one, or null
        return {"anyOf": [_of(kind[0], defs), {"type": "null"}]}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        options = [_of(option, defs) for option in arguments if option is not type(None)]
        return {"anyOf": [*options, {"type": "null"}]} if type(None) in arguments else {"anyOf": options}
    if origin in (list, tuple):
        return {"type": "array", "items": _of(arguments[0], defs)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(arguments[1], defs)}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        name = kind.__name__
        if name not in defs:
            defs[name] = {}
            hints = typing.get_type_hints(kind)
            defs[name] = _object({f.name.removesuffix("_"): hints[f.name] for f in dataclasses.fields(kind)}, defs)
        return {"$ref": f"#/$defs/{name}"}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    return {str: {"type": "string"}, bool: {"type": "boolean"}, int: {"type": "integer"}, float: _NUMBER}[kind]


def text(name: str) -> str:
    """docs/reference/json/<name>.schema.json as it should be."""
    return json.dumps(schema(name), indent=1) + "\n"


def page() -> str:
    """docs/reference/json.md as it should be."""
    rows = [
        f"| [`{name}`](json/{name}.schema.json) | {', '.join(f'`{c}`' for c in document.commands)} | {document.about} |"
        for name, document in DOCUMENTS.items()
    ]
    return _PAGE.format(version=SCHEMA_VERSION, rows="\n".join(rows).replace("`every command`", "every command"))


_PAGE = """\
# JSON output

`--format json` (or `--json`) prints one JSON document on stdout. Its first two keys say what it is:

```json
{{"schema_version": {version}, "type": "attempt", "verdict": "kept", "speedup": 1.31}}
```

A failed command prints an `error` document there, and the same text on stderr:

```json
{{"schema_version": {version}, "type": "error", "text": "no script train.py; …", "exit_code": 2}}
```

New keys may come with any version of advisor, so ignore the ones that you do not know. When a key is removed or changes its meaning,
`schema_version` rises. A number that is not finite is `null`. Times end in `_us` (microseconds), sizes in `_bytes`, shares in `_frac`
(0 to 1).

| type | commands | what it holds |
|---|---|---|
{rows}

Made by `python -m advisor.reporting.json_schema` from the types in `advisor/core`. A test validates the output of each command.
"""


def write(folder: Path) -> None:
    """Write the page and the schemas below `folder`, the reference of the docs."""
    (folder / "json").mkdir(exist_ok=True)
    (folder / "json.md").write_text(page(), encoding="utf-8")
    for name in DOCUMENTS:
        (folder / "json" / f"{name}.schema.json").write_text(text(name), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else _SPACE))
