"""What is imported is declared: an environment with the declared dependencies alone lacks nothing that advisor asks for."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The distributions whose modules have another name than their own.
MODULES = {
    "pyyaml": "yaml",
    "nvidia-ml-py": "pynvml",
    "cupy-cuda12x": "cupy",
    "cupy-cuda13x": "cupy",
    "nvidia-cuda-cupti": "nvidia",
}
# What is only asked for, and never needed: who has it, and where.
ASKED_FOR = {
    "PIL": ("the script, whose images are its own", {"profiling/inside/normalising.py"}),
    "triton": ("CUDA builds of torch", {"transforms/compile.py", "profiling/machine/environment.py"}),
    "sitecustomize": ("the user", {"profiling/bootstrap/sitecustomize.py"}),
}
# What an extra brings is for these parts alone, which say so where it is absent.
OPTIONAL = {
    "cupy": {"ops/cuda_driver.py", "ops/nvrtc.py", "pipeline/inside.py", "bench/cupy_trainings.py"},
    "nvidia": {"profiling/machine/cupti.py"},
    "mcp": {"agents/server.py"},
    "torchvision": {"bench/hosts.py"},
    "pytest": {"testing/options.py", "testing/plugin.py"},
}
IMPORTERS = ("import_module", "__import__", "find_spec", "importorskip", "run_module")


def name(requirement: str) -> str:
    found = re.sub(r"[-_.]+", "-", Requirement(requirement).name).lower()
    return MODULES.get(found, found)


def declared() -> set[str]:
    return {name(requirement) for requirement in PROJECT["dependencies"]}


def in_extras() -> set[str]:
    return {name(requirement) for words in PROJECT["optional-dependencies"].values() for requirement in words}


def imported(source: str) -> Iterator[str]:
    """The packages that this source imports: by a statement wherever it stands, or by name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            text = first.values[0] if isinstance(first, ast.JoinedStr) and first.values else first
            if called in IMPORTERS and isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text.value.split(".")[0]


@functools.cache  # by three tests: it parses every module
def of_others() -> dict[str, set[str]]:
    """Package to the files of advisor/ that import it, without Python's own and ours."""
    found: dict[str, set[str]] = {}
    for path in sorted((REPO / "advisor").rglob("*.py")):
        for package in imported(path.read_text(encoding="utf-8")):
            if package != "advisor" and package not in sys.stdlib_module_names:
                found.setdefault(package, set()).add(path.relative_to(REPO / "advisor").as_posix())
    return found


def test_every_way_to_import_is_read() -> None:
    source = """
import one.part
def late():
    from two import a
    import three as b, four
    import_module("five.part")
    importlib.util.find_spec("six")
    import_module(f"seven.{b}")
    __import__("eight")
from . import no
"""
    assert sorted(imported(source)) == ["eight", "five", "four", "one", "seven", "six", "three", "two"]


def test_what_is_imported_is_declared() -> None:
    """A package that another one brings today (NumPy by CuPy, MarkupSafe by Jinja2) is declared too."""
    wanted = {package: files for package, files in of_others().items() if package not in declared()}
    for table in (OPTIONAL, {package: files for package, (_, files) in ASKED_FOR.items()}):
        for package, files in table.items():
            assert files >= wanted.get(package, set()), f"{package} is imported in other places, and not declared"
            wanted.pop(package, None)
    assert wanted == {}


def test_what_is_declared_is_imported() -> None:
    assert sorted(declared() - set(of_others())) == []


def test_what_an_extra_brings_is_declared_there() -> None:
    assert sorted(set(OPTIONAL) - in_extras()) == []
    assert sorted((set(OPTIONAL) | set(ASKED_FOR)) - set(of_others())) == []


def test_the_lowest_version_of_each_dependency_is_named() -> None:
    assert [r for r in PROJECT["dependencies"] if ">=" not in r] == []
