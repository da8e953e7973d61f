"""The files that a test run leaves: a baseline, and everything measured as JSON."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from advisor import __version__
from advisor.core.errors import AdvisorError
from advisor.testing import baselines, records
from advisor.testing.options import Options
from advisor.testing.records import Tested


def write(options: Options, tested: Sequence[Tested]) -> tuple[dict[str, str], list[str]]:
    """What was written → where, and what could not be. Failed tests enter no baseline: what they measured is not what is
    wanted."""
    files: dict[str, str] = {}
    problems: list[str] = []
    good = [test for test in tested if test.outcome not in ("failed", records.XFAILED)]
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
        done = "updated" if update else "stored"
        try:
            path = baselines.save(options.storage, name, machine, entries, update=update)
        except AdvisorError as error:
            problems.append(f"baseline {name!r} was not {done}: {error}")
        else:
            files[f"baseline {name!r} {done}"] = str(path)
    if options.json is not None:
        now = datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
        try:
            records.write(options.json, records.RecordedRun(advisor=__version__, created=now, tests=tuple(tested)))
        except AdvisorError as error:
            problems.append(f"what was measured was not written: {error}")
        else:
            files["everything measured"] = str(options.json)
    return files, problems
