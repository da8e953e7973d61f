"""A plan's kept changes as edits of the script's source: those that people write by hand, for who wants them without advisor.

The text is read as Python, never run, and changed by position, so that all else stays as it was written. What cannot be found in it,
or has no short form in source (kernels, captured graphs), is named with its reason.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from advisor.core.errors import AdvisorError
from advisor.core.plan import Plan
from advisor.core.transform_table import title
from advisor.core.verdict import Status
from advisor.trials.snippets import FUSED, SNIPPETS

OPTIMIZERS = (*FUSED, "RMSprop", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "Rprop")


@dataclass(frozen=True, slots=True)
class Written:
    """The script with what could be written, and what could not: transform id → why."""

    path: Path
    before: str
    after: str
    done: tuple[str, ...]
    left: dict[str, str]

    def diff(self) -> str:
        """The change as a unified diff, as `git apply` takes it; "" for none."""
        name = self.path.as_posix().lstrip("/")
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            f"a/{name}",
            f"b/{name}",
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


class _NotFound(Exception):
    """The place that a change belongs to is not in the script."""


@dataclass(slots=True)
class _Script:
    """The source, its tree, and the edits so far: replaced spans, and lines put in before a line."""

    text: str
    tree: ast.Module
    spans: list[tuple[int, int, str]] = field(default_factory=list)  # offsets in bytes of the text
    inserted: dict[int, list[str]] = field(default_factory=dict)  # line number, from 1 → lines before it
    indented: list[tuple[int, int, str]] = field(default_factory=list)  # first and last line, the line that heads them
    keywords: dict[int, tuple[ast.Call, dict[str, str]]] = field(default_factory=dict)  # of calls, by their identity

    def offset(self, line: int, column: int) -> int:
        lines = self.text.encode().splitlines(keepends=True)
        return sum(len(one) for one in lines[: line - 1]) + column

    def source(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ""

    def replace(self, node: ast.expr, text: str) -> None:
        end = self.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        self.spans.append((self.offset(node.lineno, node.col_offset), end, text))

    def before(self, statement: ast.stmt, *lines: str) -> None:
        pad = " " * statement.col_offset
        self.inserted.setdefault(statement.lineno, []).extend(pad + line for line in lines)

    def calls(self) -> Iterator[ast.Call]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))

    def named(self, *names: str) -> list[ast.Call]:
        """Calls of something whose last name is one of these."""
        return [call for call in self.calls() if _last_name(call.func) in names]


def write(plan: Plan, path: Path) -> Written:
    """The kept changes of the plan written into the script at `path`, which stays as it is.

    Raises:
        AdvisorError: when it cannot be read as Python.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise AdvisorError(f"{path} cannot be read as Python ({error})", expected="the plan's script") from None
    script, done, left = _Script(text, tree), [], {}
    for item in plan.items:
        if item.status != Status.KEPT:
            continue
        writer = WRITERS.get(item.transform)
        try:
            if writer is None:
                raise _NotFound("it has no short form in source; `advisor.enable` applies it")
            writer(script, item.parameters)
            done.append(item.transform)
        except _NotFound as error:
            left[item.transform] = str(error)
    for call, wanted in script.keywords.values():
        _write_keywords(script, call, wanted)
    after = _applied(script)
    try:
        ast.parse(after)
    except SyntaxError as error:
        raise AdvisorError(f"the edits of {path} do not parse ({error})", fix="Write them by hand.") from None
    return Written(path, text, after, tuple(done), left)


def as_python(plan: Plan, plan_file: str, path: Path | None = None) -> str:
    """The kept changes as lines of Python to copy from: for a model `model`, a batch `images`, and so on.

    The optimizer is that of the script at `path`, where it can be read: another one would not be the training that was proved.
    """
    kept = [item for item in plan.items if item.status == Status.KEPT]
    lines: list[str] = []
    rest = []
    for item in kept:
        if (snippet := SNIPPETS.get(item.transform)) is None:
            rest.append(item)
            continue
        made = _optimizers(path) if item.transform == "fused_optimizer" and path else []
        lines += [f"# {title(item.transform)}", *(made or snippet(item.parameters)), ""]
    if any("torch." in line for line in lines):
        lines[:0] = ["import torch", ""]
    if rest:
        lines += [
            "# These have no short form in source, so advisor applies them, and the whole plan, as the training begins:"
        ]
        lines += [f"#   {title(item.transform)}" for item in rest]
        lines += ["import advisor", "", f'advisor.enable("{plan_file}")', ""]
    return "\n".join(lines)


def _optimizers(path: Path) -> list[str]:
    """The script's optimizers as they are made, with `fused=True`; none where it cannot be read or makes none."""
    try:
        text = path.read_text(encoding="utf-8")
        script = _Script(text, ast.parse(text))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return []
    calls = [call for call in script.named(*FUSED) if _of_torch(call.func)]
    for call in calls:
        call.keywords = [k for k in call.keywords if k.arg not in ("foreach", "fused")]
        call.keywords.append(ast.keyword(arg="fused", value=ast.Constant(value=True)))
    return [f"optimizer = {ast.unparse(call)}" for call in calls]


# -- one function a change ---------------------------------------------------------------------------------------------


def _flags(*lines: str) -> Callable[[_Script, Mapping[str, str]], None]:
    def writer(script: _Script, parameters: Mapping[str, str]) -> None:
        body = script.tree.body
        imports = [i for i, node in enumerate(body) if isinstance(node, (ast.Import, ast.ImportFrom))]
        if not any(isinstance(n, ast.Import) and any(a.name == "torch" for a in n.names) for n in body):
            raise _NotFound("the script does not `import torch` at its top")
        behind = (body[imports[-1]].end_lineno or 0) + 1
        script.inserted.setdefault(behind, [""]).extend(lines)

    return writer


def _fused_optimizer(script: _Script, parameters: Mapping[str, str]) -> None:
    calls = [call for call in script.named(*FUSED) if _of_torch(call.func)]
    if not calls:
        raise _NotFound(f"no torch.optim.{'/'.join(FUSED)} is made in the script")
    for call in calls:
        also = {"foreach": "None"} if any(k.arg == "foreach" for k in call.keywords) else {}
        _set_keywords(script, call, {"fused": "True", **also})


def _set_to_none(script: _Script, parameters: Mapping[str, str]) -> None:
    calls = [call for call in script.named("zero_grad") if any(k.arg == "set_to_none" for k in call.keywords)]
    if not calls:
        raise _NotFound("no zero_grad(set_to_none=False) in the script")
    for call in calls:
        _set_keywords(script, call, {"set_to_none": "True"})


def _loader(script: _Script, parameters: Mapping[str, str]) -> None:
    wanted = {"num_workers": parameters.get("workers", "4")}
    if parameters.get("persistent") == "true":
        wanted["persistent_workers"] = "True"
    if "prefetch_factor" in parameters:
        wanted["prefetch_factor"] = parameters["prefetch_factor"]
    _set_loader(script, wanted)


def _set_loader(script: _Script, wanted: Mapping[str, str]) -> None:
    loaders = script.named("DataLoader")
    if not loaders:
        raise _NotFound("no DataLoader is made in the script")
    train = [c for c in loaders if any(k.arg == "shuffle" and ast.unparse(k.value) == "True" for k in c.keywords)]
    for call in train or loaders[:1]:
        _set_keywords(script, call, wanted)


def _prefetch(script: _Script, parameters: Mapping[str, str]) -> None:
    _set_loader(script, {"pin_memory": "True"})
    loop, _, _ = _training(script)
    for call in (n for n in ast.walk(loop) if isinstance(n, ast.Call) and _last_name(n.func) in ("to", "cuda")):
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            _set_keywords(script, call, {"non_blocking": "True"})


def _channels_last(script: _Script, parameters: Mapping[str, str]) -> None:
    _, forward, call = _training(script)
    model = ast.unparse(call.func)
    if not call.args or not isinstance(call.args[0], ast.Name):
        raise _NotFound(f"the batch that {model}() gets has no name of its own")
    batch = call.args[0].id
    script.before(_makes_optimizer(script, model), f"{model} = {model}.to(memory_format=torch.channels_last)")
    script.before(forward, f"{batch} = {batch}.to(memory_format=torch.channels_last)")


def _autocast(script: _Script, parameters: Mapping[str, str]) -> None:
    loop, forward, call = _training(script)
    body = _holding(loop, forward)
    start = body.index(forward)
    backward = next((i for i, s in enumerate(body) if i >= start and _contains(s, "backward")), None)
    if backward is None or backward == start:
        raise _NotFound("no statement between the model's call and backward() that autocast could be around")
    # Up to where the loss is computed: what stands between that and backward() needs no autocast.
    losses = _names(body[backward])
    ends = [s for s in body[start:backward] if isinstance(s, ast.Assign) and losses & _names(s.targets[0])]
    last = ends[-1] if ends else body[backward - 1]
    named = bool(call.args) and isinstance(call.args[0], ast.Name)
    batch = ast.unparse(call.args[0]) if named else f"next({ast.unparse(call.func)}.parameters())"
    head = " " * forward.col_offset + f"with torch.autocast({batch}.device.type, dtype=torch.bfloat16):"
    script.indented.append((forward.lineno, last.end_lineno or last.lineno, head))


def _compile(script: _Script, parameters: Mapping[str, str]) -> None:
    _, _, call = _training(script)
    model = ast.unparse(call.func)
    script.before(_makes_optimizer(script, model), f"{model}.compile()")


def _deferred(script: _Script, parameters: Mapping[str, str]) -> None:
    loop, _, _ = _training(script)
    found = False
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            for call in (n for n in ast.walk(node.value) if isinstance(n, ast.Call)):
                if _last_name(call.func) == "item" and isinstance(call.func, ast.Attribute) and not call.args:
                    script.replace(call, f"{script.source(call.func.value)}.detach()")
                    found = True
    if not found:
        raise _NotFound("no running sum of `.item()`s in the training loop; move other reads out of it by hand")


WRITERS: dict[str, Callable[[_Script, Mapping[str, str]], None]] = {
    "tf32": _flags("torch.backends.cuda.matmul.allow_tf32 = True", "torch.backends.cudnn.allow_tf32 = True"),
    "cudnn_benchmark": _flags("torch.backends.cudnn.benchmark = True"),
    "fused_optimizer": _fused_optimizer,
    "set_to_none": _set_to_none,
    "loader_workers": _loader,
    "prefetch": _prefetch,
    "channels_last": _channels_last,
    "amp_bf16": _autocast,
    "compile": _compile,
    "defer_sync": _deferred,
}


# -- finding and editing -----------------------------------------------------------------------------------------------


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _of_torch(node: ast.expr) -> bool:
    """`optim.SGD`, `torch.optim.SGD` or a bare `SGD`."""
    return isinstance(node, ast.Name) or ast.unparse(node).rpartition(".")[0] in ("optim", "torch.optim")


def _contains(node: ast.AST, attribute: str) -> bool:
    return any(isinstance(n, ast.Call) and _last_name(n.func) == attribute for n in ast.walk(node))


def _training(script: _Script) -> tuple[ast.For | ast.While, ast.stmt, ast.Call]:
    """The loop that calls backward(), the statement in it that calls the model, and that call."""
    loops = [n for n in ast.walk(script.tree) if isinstance(n, (ast.For, ast.While)) and _contains(n, "backward")]
    if not loops:
        raise _NotFound("no loop with backward() in the script")
    loop = loops[-1]  # the innermost: walked last
    models = {
        ast.unparse(call.func.value)
        for call in script.calls()
        if isinstance(call.func, ast.Attribute) and call.func.attr == "parameters"
    }
    for statement in (n for n in ast.walk(loop) if isinstance(n, ast.stmt) and n is not loop):
        if isinstance(statement, (ast.For, ast.While, ast.If, ast.With, ast.Try)):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in models:
                return loop, statement, node
    raise _NotFound("the loop does not call a model whose parameters() the script gives to an optimizer")


def _holding(loop: ast.AST, statement: ast.stmt) -> list[ast.stmt]:
    """The list of statements that this one is in."""
    for node in ast.walk(loop):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and statement in body:
                return body
    raise _NotFound("the model's call stands in no block")


def _makes_optimizer(script: _Script, model: str) -> ast.stmt:
    """The statement that makes the optimizer: changes of the model go before it, where the model is whole and on its device."""
    for statement in (n for n in ast.walk(script.tree) if isinstance(n, (ast.Assign, ast.AnnAssign))):
        for call in (n for n in ast.walk(statement) if isinstance(n, ast.Call)):
            if _last_name(call.func) in OPTIMIZERS and f"{model}.parameters()" in ast.unparse(call):
                return statement
    raise _NotFound(f"no optimizer of {model}.parameters() is made in the script")


def _set_keywords(script: _Script, call: ast.Call, wanted: Mapping[str, str]) -> None:
    """Give the call these keywords, in place of the values that it has for them."""
    if any(keyword.arg is None for keyword in call.keywords):
        raise _NotFound(f"{ast.unparse(call.func)}() takes its arguments from a dict (**)")
    script.keywords.setdefault(id(call), (call, {}))[1].update(wanted)


def _write_keywords(script: _Script, call: ast.Call, wanted: Mapping[str, str]) -> None:
    has = {keyword.arg: keyword.value for keyword in call.keywords}
    for name, value in wanted.items():
        if name in has:
            script.replace(has[name], value)
    more = ", ".join(f"{name}={value}" for name, value in wanted.items() if name not in has)
    if not more:
        return
    given = [*call.args, *has.values()]
    last = max(given, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0)) if given else None
    if last is None:
        at = script.offset(call.end_lineno or call.lineno, (call.end_col_offset or 1) - 1)
    else:
        at = script.offset(last.end_lineno or last.lineno, last.end_col_offset or 0)
    script.spans.append((at, at, more if last is None else f", {more}"))


def _applied(script: _Script) -> str:
    """The text with all edits: spans first, by position from the end, then lines."""
    raw = script.text.encode()
    for start, end, text in sorted(script.spans, reverse=True):
        raw = raw[:start] + text.encode() + _lines_kept(raw[start:end], text) + raw[end:]
    found: list[str] = []
    for number, line in enumerate(raw.decode().splitlines(keepends=True), 1):
        found += [f"{new}\n" for new in script.inserted.get(number, ())]
        for first, last, head in script.indented:
            if number == first:
                found.append(f"{head}\n")
            if first <= number <= last and line.strip():
                line = f"    {line}"
        found.append(line)
    return "".join(found)


def _lines_kept(old: bytes, new: str) -> bytes:
    """A call over several lines that is written in one leaves its other lines empty, so that later line numbers hold."""
    return b"\n" * max(0, old.count(b"\n") - new.count("\n"))
