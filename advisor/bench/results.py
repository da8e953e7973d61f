"""Where benchmark results go and how they are written: docs/benchmarks/<gpu>/<kind>.json and a generated page."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from advisor.core import locks, storage
from advisor.core.errors import AdvisorError
from advisor.resources import kernels_dir


def folder() -> Path:
    """`docs/benchmarks/<gpu>` of the checkout.

    Raises:
        AdvisorError: when advisor is installed without one; then a file must be named.
    """
    import torch

    docs = kernels_dir().parent / "docs" / "benchmarks"
    if not docs.is_dir():
        raise AdvisorError("this installation has no docs/benchmarks", fix="Name a file with --out.")
    return docs / re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def on_file(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run; empty without a file.

    Raises:
        AdvisorError: when the file holds something else.
    """
    if not path.exists():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (ValueError, KeyError, TypeError):
        raise AdvisorError(f"{path} holds no benchmark results", fix="Name another file with --out.") from None
    return rows


def write(path: Path, kind: str, rows: Sequence[Any], **facts: object) -> None:
    """Write rows with the machine's facts, atomically."""
    import torch

    document = {
        "schema_version": storage.SCHEMA_VERSION,
        "kind": kind,
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        **facts,
        "rows": [storage.to_plain(row) for row in rows],
    }
    storage.write_text(path, json.dumps(document, indent=1) + "\n")


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Inside, no other benchmark of this user and machine is between reading these results and writing them."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    with locks.exclusive(locks.of_user(f"results-{name}")):
        yield
