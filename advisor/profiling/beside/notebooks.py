"""Notebooks as scripts: the code cells of an .ipynb, or what a notebook's session holds, as a file that Python runs."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from advisor.core.cache import NOTEBOOKS, cache_dir
from advisor.core.errors import AdvisorError, cause
from advisor.core.storage import write_text
from advisor.loop.sources import CELL

SUFFIX = ".ipynb"
# What earlier cells leave behind for later ones, without doing the work again: trainings are loops and calls.
_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def as_script(notebook: Path) -> Path:
    """The code cells of a notebook as a script in the user's cache folder, whose imports find what lies beside the notebook.

    Raises:
        AdvisorError: when it cannot be read or is no notebook.
    """
    try:
        document: Any = json.loads(notebook.read_text(encoding="utf-8"))
        cells = [cell["source"] for cell in document["cells"] if cell["cell_type"] == "code"]
    except OSError as error:
        raise AdvisorError(f"{notebook} cannot be read ({cause(error)})", expected="a Jupyter notebook") from None
    except (ValueError, KeyError, TypeError):
        raise AdvisorError(f"{notebook} is no notebook", expected="JSON with cells, as Jupyter writes it") from None
    texts = ["".join(cell) if isinstance(cell, list) else str(cell) for cell in cells]
    return written(notebook.stem, texts, notebook.resolve().parent)


def written(name: str, cells: Iterable[str], folder: Path) -> Path:
    """These cells as a script; `folder` comes first on its path. Lines for IPython alone (`%`, `!`, `?`) become comments."""
    lines = ["import sys", f"sys.path.insert(0, {str(folder)!r})"]
    for number, cell in enumerate(cells, 1):
        lines += ["", f"{CELL}{number}", *map(_plain, cell.splitlines())]
    text = "\n".join(lines) + "\n"
    key = hashlib.sha256(f"{folder}\0{text}".encode()).hexdigest()[:16]
    path = cache_dir() / NOTEBOOKS / key / f"{name}.py"
    write_text(path, text)
    return path


def definitions(cell: str) -> str:
    """The imports, functions, classes and assignments of a cell; "" for one that is no Python."""
    text = "\n".join(map(_plain, cell.splitlines()))
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return ""
    return "\n".join(ast.get_source_segment(text, node) or "" for node in body if isinstance(node, _DEFINES))


def _plain(line: str) -> str:
    first = line.lstrip()[:1]
    if first not in ("%", "!", "?"):
        return line
    pad = line[: len(line) - len(line.lstrip())]
    return f"{pad}pass  # {line.strip()}" if pad else f"# {line}"
