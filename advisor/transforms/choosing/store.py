"""Choices kept in the user's cache, by shape, dtype, direction, device and versions."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

from advisor.core.cache import cache_dir
from advisor.core.errors import AdvisorError
from advisor.core.storage import from_plain, write_text
from advisor.transforms.choosing.decide import Choice

SCHEMA = 1
NAME = "convolution_choices.json"


class Store:
    """A file of choices. What cannot be read is as good as empty, and what cannot be written is chosen again the next time."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_dir() / NAME
        self._lock = threading.Lock()
        self._found = self._read()

    def get(self, key: str) -> Choice | None:
        """What was chosen for this key."""
        return self._found.get(key)

    def put(self, key: str, choice: Choice) -> None:
        """Keep it, beside what other processes have written since."""
        with self._lock:
            self._found = {**self._read(), **self._found, key: choice}
            plain = {k: dataclasses.asdict(c) for k, c in self._found.items()}
            try:
                write_text(self.path, json.dumps({"schema_version": SCHEMA, "choices": plain}, indent=1) + "\n")
            except AdvisorError:
                return

    def _read(self) -> dict[str, Choice]:
        try:
            document: Any = json.loads(self.path.read_text(encoding="utf-8"))
            if document["schema_version"] != SCHEMA:
                return {}
            return {key: from_plain(Choice, choice) for key, choice in document["choices"].items()}
        except Exception:  # of another version, half written, someone else's: it is a cache
            return {}
