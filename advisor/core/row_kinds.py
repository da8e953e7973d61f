"""What a kernel's row does, by its operator: counted by metrics and named by a finding's places."""

from __future__ import annotations

import re

from advisor.core.profile import KernelRow

_INDEX = re.compile(r"aten::_?(index|gather|scatter|embedding|masked_|nonzero|take|put)")


def is_index(row: KernelRow) -> bool:
    """Indexing, gather and scatter."""
    return row.kind == "index" or bool(_INDEX.match(row.op or row.name))
