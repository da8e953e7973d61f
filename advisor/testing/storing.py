"""The files that a test run leaves: a baseline, and everything measured as JSON."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from advisor import __version__
from advisor.testing import baselines, records
from advisor.testing.options import Options
from advisor.testing.records import Tested


def write(options: Options, tested: Sequence[Tested]) -> dict[str, str]:
    """What was written → where. Failed tests enter no baseline: what they measured is not what is wanted."""
    files: dict[str, str] = {}
    good = [test for test in tested if test.outcome != "failed"]
    machine = next((r.machine for test in good for r in test.records if r.machine is not None), None)
    names = {options.save: False} if options.save else {}
    if options.update and options.compare:
        names[options.compare] = True
    for name, update in names.items():
        if machine is None:
            continue
        entries = {
            test.test: [r.entry for r in test.records if r.entry is not None]
            for test in good
            if any(r.entry is not None for r in test.records)
        }
        path = baselines.save(options.storage, name, machine, entries, update=update)
        files[f"baseline {name!r} {'updated' if update else 'stored'}"] = str(path)
    if options.json is not None:
        now = datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
        records.write(options.json, records.Run(advisor=__version__, created=now, tests=tuple(tested)))
        files["everything measured"] = str(options.json)
    return files
