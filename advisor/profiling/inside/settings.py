"""Where the script changes a setting of torch's that decides how fast it runs: found in its own sources, which are read and not run.

Assignments leave no trace in the process; so the files of the script's own that it has loaded are searched for what assigns or calls them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from advisor.loop import sources

MAX_FILES, MAX_BYTES = 400, 1 << 20  # of the script's own; what is larger was generated

# Setting → the last names of what is assigned, or called. As `torch.backends.cudnn.enabled = …`, or with `cudnn` imported by its name.
_ASSIGNED: dict[tuple[str, ...], str] = {
    ("cudnn", "enabled"): "cudnn_enabled",
    ("cudnn", "benchmark"): "cudnn_benchmark",
    ("cudnn", "deterministic"): "cudnn_deterministic",
    ("cudnn", "allow_tf32"): "tf32_conv",
    ("conv", "fp32_precision"): "tf32_conv",
    ("matmul", "allow_tf32"): "tf32_matmul",
    ("matmul", "fp32_precision"): "tf32_matmul",
}
_CALLED = {
    "use_deterministic_algorithms": "deterministic_algorithms",
    "set_deterministic_debug_mode": "deterministic_algorithms",
    "set_detect_anomaly": "anomaly",
    "detect_anomaly": "anomaly",
    "set_float32_matmul_precision": "tf32_matmul",
    "set_num_threads": "cpu_threads",
    "set_per_process_memory_fraction": "memory_fraction",
}
# Given to DistributedDataParallel, or to a library that gives it on.
_ARGUMENTS = {"find_unused_parameters": "find_unused_parameters", "detect_anomaly": "anomaly"}
_KEYWORDS = {"enabled", "benchmark", "deterministic"}  # of `torch.backends.cudnn.flags(enabled=False)`
_VARIABLES = {"OMP_NUM_THREADS": "cpu_threads", "MKL_NUM_THREADS": "cpu_threads"}
_WORDS = re.compile("|".join([*_CALLED, *_ARGUMENTS, "cudnn", "allow_tf32", "fp32_precision", *_VARIABLES]))


def lines(modules: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Setting → "train.py:12", the last line in each file that sets it, the main script's before those of its modules.

    Args:
        modules: those that are loaded, by name, `sys.modules` by default.
    """
    found: dict[str, str] = {}
    for path in _own_files(sys.modules if modules is None else modules):
        for name, line in of_file(path):
            found.setdefault(name, sources.place(path, line))
    return found


@functools.lru_cache(maxsize=MAX_FILES)
def of_file(path: str) -> tuple[tuple[str, int], ...]:
    """Settings with their lines; read once a process."""
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
        if os.path.getsize(path) <= MAX_BYTES:
            with open(path, encoding="utf-8") as stream:
                text = stream.read()
            if _WORDS.search(text):
                return tuple(_settings(ast.parse(text)))
    return ()


def _own_files(modules: Mapping[str, Any]) -> list[str]:
    main = getattr(modules.get("__main__"), "__file__", None)
    others = [getattr(module, "__file__", None) for module in list(modules.values())]
    paths = [os.path.abspath(path) for path in (main, *others) if isinstance(path, str) and path.endswith(".py")]
    own = [path for path in dict.fromkeys(paths) if sources.kind(path) == sources.USER]
    return own[:MAX_FILES]


def _settings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Settings with their lines, the last of each first."""
    found = [pair for node in ast.walk(tree) for pair in _of_node(node)]
    yield from sorted(found, key=lambda pair: -pair[1])


def _of_node(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                name = _assigned(part)
                if name:
                    yield name, node.lineno
    elif isinstance(node, ast.Call):
        names = _dotted(node.func)
        yield from ((_ARGUMENTS[word.arg], word.value.lineno) for word in node.keywords if word.arg in _ARGUMENTS)
        if names and names[-1] in _CALLED:
            yield _CALLED[names[-1]], node.lineno
        elif names[-2:] == ("cudnn", "flags"):
            for keyword in node.keywords:
                if keyword.arg in _KEYWORDS:
                    yield f"cudnn_{keyword.arg}", node.lineno


def _assigned(target: ast.expr) -> str:
    if isinstance(target, ast.Subscript):  # os.environ["OMP_NUM_THREADS"] = "1"
        key = target.slice
        return _VARIABLES.get(str(key.value), "") if isinstance(key, ast.Constant) else ""
    return _ASSIGNED.get(_dotted(target)[-2:], "")


def _dotted(node: ast.expr) -> tuple[str, ...]:
    """`a.b.c` as its names; () for anything else at its root."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return tuple(reversed(names)) if names else ()
    return (node.id, *reversed(names))
