"""What a child tells while it runs, read as it comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Progress:
    """Reads `progress.jsonl` as it grows; a line that is not whole yet is left for the next time."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest = path, b""
        try:
            self._offset = path.stat().st_size  # what an earlier child told is not this child's
        except OSError:
            self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """The events since the last time."""
        try:
            with open(self._path, "rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except OSError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a line cut off by a kill
            if isinstance(event, dict):
                yield event
