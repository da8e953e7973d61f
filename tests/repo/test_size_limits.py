"""What a newcomer can take in: modules, functions, parameters and nesting have limits, imports go in no circle, a name is of one class,
and what is suppressed says why. `size_exceptions.txt` has what is beyond a limit still: it may only become shorter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
EXCEPTIONS = Path(__file__).with_name("size_exceptions.txt")
MODULE_LINES, FUNCTION_LINES, PARAMETERS, NESTING = 400, 60, 8, 4

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
SUPPRESSED = re.compile(r"#\s*(?:noqa|type:\s*ignore)\b(?::\s*[A-Z0-9, ]+)?(?:\[[^\]]*\])?")


def functions(
    tree: ast.AST, within: tuple[str, ...] = ()
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            name = (*within, node.name)
            if isinstance(node, FUNCTIONS):
                yield ".".join(name), node
            yield from functions(node, name)
        else:
            yield from functions(node, within)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many arguments a caller has to understand.

    None are counted of a click command: each is an option of its command line, which docs/reference/cli.md lists, and nobody calls it. Nor
    of an autograd function's `forward`: gradients find their inputs by position, so that tensors in an object would have none.
    """
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    commands = any("command" in ast.unparse(decorator).partition("(")[0] for decorator in function.decorator_list)
    if commands or (function.name in ("forward", "backward") and names[:1] == ["ctx"]):
        return 0
    return len(names) - (names[:1] in (["self"], ["cls"]))


def nesting(node: ast.AST, depth: int = 0) -> int:
    """How many blocks stand in each other at most; an `elif` stands beside its `if`, and a function of its own counts for itself."""
    deepest = depth
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
                continue
            beside = (
                isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If) and len(node.orelse) == 1
            )
            deepest = max(deepest, nesting(child, depth + (isinstance(child, BLOCKS) and not beside)))
    return deepest


def beyond(path: str, text: str) -> Iterator[tuple[str, int]]:
    """What of a module is beyond a limit, as a line of the exceptions has it; and by which number."""
    if (lines := len(text.splitlines())) > MODULE_LINES:
        yield f"lines {path}", lines
    for name, function in functions(ast.parse(text)):
        if (length := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES:
            yield f"length {path} {name}", length
        if (count := parameters(function)) > PARAMETERS:
            yield f"parameters {path} {name}", count
        if (depth := nesting(function)) > NESTING:
            yield f"nesting {path} {name}", depth


def imported(text: str, modules: set[str]) -> set[str]:
    """Those of `modules` that a source imports anywhere, in functions and for types too: a reader has to know them as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules else node.module or "")
    return found & modules


def circles(sources: dict[str, str]) -> list[list[str]]:
    """The modules of each circle of imports: those that lead to each other."""
    follows = {name: imported(text, set(sources)) - {name} for name, text in sources.items()}
    reach: dict[str, set[str]] = {}
    for name in follows:
        seen, todo = set(), [name]
        while todo:
            for other in follows[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        reach[name] = seen
    found = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in follows if name in reach[name]
    }
    return sorted(sorted(circle) for circle in found)


def unexplained(text: str) -> Iterator[str]:
    """Suppressions with no word behind them, and no comment above that is not itself one."""
    above = ""
    for line in text.splitlines():
        if SUPPRESSED.search(line):
            rest = SUPPRESSED.sub("", line[SUPPRESSED.search(line).start() :])  # type: ignore[union-attr]  # found in the line above
            if not re.search(r"\w", rest) and not above.lstrip().startswith("#"):
                yield line.strip()
        above = line


def sources(*folders: str) -> dict[str, str]:
    return {
        path.relative_to(REPO).as_posix(): path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((REPO / folder).rglob("*.py"))
    }


def excepted(kinds: tuple[str, ...]) -> set[str]:
    lines = EXCEPTIONS.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line.partition(" ")[0] in kinds}


def test_nothing_is_larger_than_a_reader_takes_in() -> None:
    found = {line: number for path, text in sources("advisor", "tools").items() for line, number in beyond(path, text)}
    allowed = excepted(("lines", "length", "parameters", "nesting"))
    assert {line: number for line, number in found.items() if line not in allowed} == {}
    assert allowed - set(found) == set(), "within the limits by now: take the lines out of size_exceptions.txt"


def test_imports_go_in_no_circle() -> None:
    modules = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): text
        for path, text in sources("advisor").items()
    }
    found = {f"circle {' '.join(circle)}" for circle in circles(modules)}
    allowed = excepted(("circle",))
    assert found - allowed == set()
    assert allowed - found == set(), "no circle any more: take the line out of size_exceptions.txt"


def shared_names(sources: dict[str, str]) -> set[str]:
    """Public classes of one name in several modules: a reader who meets the name has to ask which."""
    named: dict[str, set[str]] = {}
    for path, text in sources.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named.setdefault(node.name, set()).add(path)
    return {name for name, paths in named.items() if len(paths) > 1}


def test_a_name_is_of_one_class() -> None:
    found = {f"name {name}" for name in shared_names(sources("advisor"))}
    allowed = excepted(("name",))
    assert found - allowed == set(), "name it for what it is here"
    assert allowed - found == set(), "one class each by now: take the lines out of size_exceptions.txt"


def test_a_shared_name_is_found() -> None:
    texts = {
        "advisor/a.py": "class A: ...",
        "advisor/b.py": "class A: ...\nclass _B: ...",
        "advisor/c.py": "class _B: ...",
    }
    assert shared_names(texts) == {"A"}
    assert shared_names({**texts, "advisor/b.py": "def A(): ..."}) == set()


def test_what_is_suppressed_says_why() -> None:
    mute = {f"mute {path}" for path, text in sources("advisor", "tests", "tools").items() if any(unexplained(text))}
    allowed = excepted(("mute",))
    assert mute - allowed == set(), "a reason behind each `noqa` and `type: ignore`, or a comment above it"
    assert allowed - mute == set(), "each says why by now: take the lines out of size_exceptions.txt"


def test_the_exceptions_are_in_order() -> None:
    lines = EXCEPTIONS.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n" * 401, ["lines a.py"]),
        ("x = 1\n" * 400, []),
        ("def f():\n" + "    x = 1\n" * 60, ["length a.py f"]),
        ("class A:\n    def f(self, a, b, c, d, e, f, g, h, i): ...", ["parameters a.py A.f"]),
        ("class A:\n    def f(self, a, b, c, d, e, f, g, *, h): ...", []),
        ("@click.command(cls=Command)\ndef f(a, b, c, d, e, f, g, h, i): ...", []),
        ("def forward(ctx, a, b, c, d, e, f, g, h, i): ...", []),
        ("def f():\n for a in b:\n  if a:\n   with a:\n    while a:\n     if a: pass", ["nesting a.py f"]),
        ("def f():\n if a: pass\n elif b: pass\n elif c: pass\n elif d: pass\n elif e: pass", []),
    ],
    ids=["long", "full", "function", "arguments", "eight", "command", "forward", "nested", "elif"],
)
def test_what_is_too_large_is_found(text: str, expected: list[str]) -> None:
    assert [line for line, _ in beyond("a.py", text)] == expected


def test_a_circle_is_found_where_a_function_closes_it() -> None:
    closed = {
        "a.b": "from a import c",
        "a.c": "def f():\n    from a.d import x",
        "a.d": "import a.b",
        "a.e": "import a.b",
    }
    assert circles(closed) == [["a.b", "a.c", "a.d"]]
    assert circles({**closed, "a.d": ""}) == []


def test_a_mute_suppression_is_found() -> None:
    off = "# no" + "qa"  # two texts, for this file is read by ruff too
    mute = f"a()  # type: ignore[arg-type]\nb()  {off}: E402\nc()  {off}\n"
    assert len(list(unexplained(mute))) == 3
    said = f"a()  # type: ignore[arg-type]  # torch says so\n# because\nb()  {off}: E402\nc()  {off}: E402 – why\n"
    assert list(unexplained(said)) == []
