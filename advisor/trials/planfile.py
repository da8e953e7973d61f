"""`plan.yaml`: written to be read and committed by people, read with care because people edit it."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from advisor.core import storage
from advisor.core.cache import is_cell
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError, cause
from advisor.core.findings import Semantics
from advisor.core.plan import Plan, PlanHashes, PlanItem
from advisor.core.transform_table import ROWS
from advisor.core.verdict import OPEN, STATUSES, UNTRIED, Status
from advisor.profiling.beside.command import script_name
from advisor.resources import kernels_dir

MAX_BYTES = 1_000_000  # a plan has tens of items; a larger file is something else

_HEAD = """\
# A plan of `advisor apply`: what was tried on this training, and what proved faster and right.
# `advisor run --plan {name} SCRIPT …` applies the items whose status is `kept`, in this order, and trains as usual.
# One that is `unconfirmed` was kept by the running loop alone; `advisor apply --plan {name}` settles it.
# To leave an item out, change its status to `skipped`. Checkpoints are those of the plain script, with or without a plan.
"""


def write(path: Path, plan: Plan) -> None:
    """Write the plan, atomically, in a stable order: the same plan gives the same text."""
    q = _quoted
    lines = [_HEAD.format(name=path.name), f"schema_version: {storage.SCHEMA_VERSION}", f"script: {q(plan.script)}"]
    lines.append("argv: [" + ", ".join(q(a) for a in plan.argv) + "]")
    lines += [f"created: {q(plan.created)}", f"run: {q(plan.run)}", f"speedup: {q(plan.speedup)}"]
    if plan.gpus > 1:
        lines += [f"gpus: {plan.gpus}", f"norms: {q(plan.norms)}", f"shard: {q(plan.shard)}"]
    lines.append("")
    lines.append(
        "# What the plan was proved on. When something here no longer fits, advisor says what and trains without the plan."
    )
    lines.append("hashes:")
    lines += [f"  {name}: {q(getattr(plan.hashes, name))}" for name in ("script", "model", "environment", "kernels")]
    lines += ["", "items:" if plan.items else "items: []"]
    for item in plan.items:
        lines += [f"  - transform: {item.transform}", f"    status: {item.status}", f"    semantics: {item.semantics}"]
        if item.parameters:
            lines.append("    parameters:")
            lines += [f"      {q(k)}: {q(v)}" for k, v in sorted(item.parameters.items())]
        lines += [
            f"    {name}: {q(getattr(item, name))}"
            for name in ("predicted", "measured", "reason")
            if getattr(item, name)
        ]
    storage.write_text(path, "\n".join(lines) + "\n")


def read(path: Path) -> Plan:
    """The plan in this file.

    Raises:
        AdvisorError: with file and line: not readable, not YAML, another schema version, an unknown key, status, semantics
            class or transform, a value of the wrong kind, a key given twice.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise AdvisorError(f"{path} has {path.stat().st_size} bytes", expected=f"a plan of at most {MAX_BYTES}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise AdvisorError(
            f"no plan {path}", fix="`advisor apply` writes one into the folder of its run; `last` is the newest here."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise AdvisorError(
            f"{path} cannot be read ({cause(error)})", expected="a plan written by `advisor apply`"
        ) from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or type(error).__name__
        raise AdvisorError(f"{where}: not YAML ({problem})", expected="a plan written by `advisor apply`") from None
    return _Reader(path).plan(root)


class _Reader:
    """Checks each node and remembers where it stands."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, node: yaml.Node | None, found: str, expected: str, fix: str = "") -> AdvisorError:
        line = f":{node.start_mark.line + 1}" if node is not None else ""
        return AdvisorError(f"{self.path}{line}: {found}", expected=expected, fix=fix)

    def mapping(self, node: yaml.Node | None, what: str, known: tuple[str, ...] | None) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            raise self.fail(node, f"{what} is {_kind(node)}", "keys and values")
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = self.text(key, f"a key of {what}")
            if name in found:
                raise self.fail(key, f"{name!r} stands twice in {what}", "each key once")
            if known is not None and name not in known:
                near = difflib.get_close_matches(name, known, 1)
                fix = f"Did you mean {near[0]!r}?" if near else ""
                raise self.fail(key, f"{what} has no key {name!r}", "one of " + ", ".join(known), fix)
            found[name] = value
        return found

    def text(self, node: yaml.Node, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self.fail(node, f"{what} is {_kind(node)}", "text")
        return str(node.value)

    def texts(self, node: yaml.Node, what: str) -> tuple[str, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise self.fail(node, f"{what} is {_kind(node)}", "a list")
        return tuple(self.text(entry, f"an entry of {what}") for entry in node.value)

    def choice(self, node: yaml.Node, what: str, known: tuple[str, ...]) -> str:
        value = self.text(node, what)
        if value not in known:
            near = difflib.get_close_matches(value, known, 1)
            fix = f"Did you mean {near[0]!r}?" if near else ""
            raise self.fail(node, f"{what} is {value!r}", "one of " + ", ".join(known), fix)
        return value

    def plan(self, root: yaml.Node | None) -> Plan:
        keys = (
            "schema_version",
            "script",
            "argv",
            "created",
            "run",
            "speedup",
            "gpus",
            "norms",
            "shard",
            "hashes",
            "items",
        )
        top = self.mapping(root, "the plan", keys)
        if "schema_version" not in top:
            raise self.fail(root, "schema_version is missing", str(storage.SCHEMA_VERSION))
        version = self.text(top["schema_version"], "schema_version")
        if version != str(storage.SCHEMA_VERSION):
            raise self.fail(
                top["schema_version"],
                f"schema_version is {version!r}",
                str(storage.SCHEMA_VERSION),
                "Make the plan again with this version of advisor.",
            )
        if "items" not in top:
            raise self.fail(root, "items is missing", "a list of changes")
        items = top["items"]
        if not isinstance(items, yaml.SequenceNode):
            raise self.fail(items, f"items is {_kind(items)}", "a list of changes")
        hashes = (
            self.mapping(top["hashes"], "hashes", ("script", "model", "environment", "kernels"))
            if "hashes" in top
            else {}
        )
        return Plan(
            script=self.text(top["script"], "script") if "script" in top else "",
            argv=self.texts(top["argv"], "argv") if "argv" in top else (),
            created=self.text(top["created"], "created") if "created" in top else "",
            items=tuple(self.item(node, i) for i, node in enumerate(items.value, 1)),
            hashes=PlanHashes(**{name: self.text(node, name) for name, node in hashes.items()}),
            speedup=self.text(top["speedup"], "speedup") if "speedup" in top else "",
            run=self.text(top["run"], "run") if "run" in top else "",
            gpus=self.count(top["gpus"], "gpus") if "gpus" in top else 1,
            norms=self.text(top["norms"], "norms") if "norms" in top else "",
            shard=self.text(top["shard"], "shard") if "shard" in top else "",
        )

    def count(self, node: yaml.Node, what: str) -> int:
        text = self.text(node, what)
        if not text.isdigit() or not int(text):
            raise self.fail(node, f"{what} is {text!r}", "a whole number from 1 on")
        return int(text)

    def item(self, node: yaml.Node, number: int) -> PlanItem:
        what = f"item {number}"
        keys = ("transform", "status", "semantics", "parameters", "predicted", "measured", "reason")
        found = self.mapping(node, what, keys)
        for name in ("transform", "status"):
            if name not in found:
                raise self.fail(node, f"{what} has no {name}", "a transform's id and a status")
        values: dict[str, Any] = {
            name: self.text(found[name], f"{name} of {what}")
            for name in ("predicted", "measured", "reason")
            if name in found
        }
        if "semantics" in found:
            values["semantics"] = self.choice(
                found["semantics"], f"semantics of {what}", tuple(s.value for s in Semantics)
            )
        if "parameters" in found:
            pairs = self.mapping(found["parameters"], f"parameters of {what}", None)
            values["parameters"] = {
                name: self.text(value, f"parameter {name!r} of {what}") for name, value in pairs.items()
            }
        status = Status(self.choice(found["status"], f"status of {what}", STATUSES))
        # What is only on record may be advice that no transform stands for.
        transform = (
            self.choice(found["transform"], f"transform of {what}", tuple(ROWS))
            if status == Status.KEPT
            else self.text(found["transform"], f"transform of {what}")
        )
        return PlanItem(transform=transform, status=status, **values)


def left_open(plan: Plan) -> bool:
    """Whether the plan says nothing for good: none of it is kept, and nothing was tried, or some of it is open."""
    statuses = {item.status for item in plan.items}
    return Status.KEPT not in statuses and (statuses <= UNTRIED or bool(statuses & OPEN))


def script_of(plan: Plan) -> str:
    """The script, module or program whose plan it is, as its user named it; "" where it does not say."""
    return script_name((plan.script, *plan.argv)) if plan.script else ""


def another_script(plan: Plan, script: str) -> str:
    """The clause that tells that the plan is of another script than this one, by its name and its text; "" where it is not."""
    theirs = script_of(plan)
    if not theirs or is_cell(theirs) or os.path.abspath(theirs) == os.path.abspath(script):
        return ""
    if plan.hashes.script and plan.hashes.script == script_hash(Path(script)):
        return ""  # moved, or seen from another folder
    return f"it is the plan of {theirs}, and this is {script}"


def script_hash(path: Path) -> str:
    """sha256 of the script's bytes; empty when it cannot be read (a module run with -m from a package)."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def environment_text(environment: Environment) -> str:
    """What a plan's speed depends on, as one line: "NVIDIA H200 sm_90 torch 2.11.0+cu130"."""
    device = (
        f"{environment.gpu_name} sm_{environment.sm_arch}"
        if environment.device == "cuda"
        else environment.cpu_name or "cpu"
    )
    return f"{device} torch {environment.torch}".strip()


def kernels_hash(folder: Path | None = None) -> str:
    """sha256 over names and contents of the bundled CUDA sources; empty when there are none."""
    folder = folder or kernels_dir()
    sources = sorted(p for p in folder.rglob("*") if p.suffix in (".cu", ".cuh", ".h")) if folder.is_dir() else []
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.relative_to(folder).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest() if sources else ""


def model_hash(modules: Iterable[Any]) -> str:
    """sha256 over class names, parameter and buffer names, shapes and dtypes of the root modules, in order of discovery.

    The same for every instance of one architecture, alone or wrapped for several processes; values play no part.
    """
    from advisor.loop.values import class_of, inner  # imports torch, which the supervisor does without

    digest = hashlib.sha256()
    for root in map(inner, modules):
        for name, module in root.named_modules():
            digest.update(f"m {name} {class_of(module).__qualname__}\n".encode())
        for kind, tensors in (("p", root.named_parameters()), ("b", root.named_buffers())):
            for name, tensor in tensors:
                digest.update(f"{kind} {name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return digest.hexdigest()


def hashes_here(script: str, *, environment: str, model: str = "") -> PlanHashes:
    """What a plan that is proved now holds for. `script` is its path, or a module's name."""
    return PlanHashes(script=script_hash(Path(script)), model=model, environment=environment, kernels=kernels_hash())


def mismatches(proved: Plan, script: str, now: PlanHashes, *, uses_kernels: bool = True) -> tuple[str, ...]:
    """What changed since the plan was proved, one clause each. A hash that is unknown on either side says nothing.

    Args:
        script: that is to train with it, as its user named it.
    """
    plan, found = proved.hashes, []
    if other := another_script(proved, script):
        found.append(other)
    elif plan.script and now.script and plan.script != now.script:
        found.append("the script's text has changed")
    if plan.model and now.model and plan.model != now.model:
        found.append("the model's modules, parameters or dtypes have changed")
    if plan.environment and now.environment and plan.environment != now.environment:
        found.append(f"it was proved on {plan.environment}, this is {now.environment}")
    if uses_kernels and plan.kernels and now.kernels and plan.kernels != now.kernels:
        found.append("advisor's bundled kernels have changed")
    return tuple(found)


def _quoted(text: str) -> str:
    # JSON's strings are YAML's double-quoted scalars, so nothing a user or a path can hold becomes syntax. What YAML would
    # fold or refuse (line separators, lone surrogates of undecodable paths) is escaped; other text stays readable.
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


def _kind(node: yaml.Node | None) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.ScalarNode):
        return f"{node.value!r}" if node.value else "empty"
    return "empty"
