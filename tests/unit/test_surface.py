"""What `import advisor` shows."""

from __future__ import annotations

import subprocess
import sys


def seen(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_dir_shows_what_the_package_offers_and_nothing_else() -> None:
    offered = "['__version__', 'disable', 'enable', 'step']"
    assert seen("import advisor; print(dir(advisor))") == offered
    assert seen("import advisor, advisor.cli, advisor.core.errors; advisor.enable; print(dir(advisor))") == offered


def test_a_star_brings_what_dir_shows() -> None:
    code = "before = set(globals()); from advisor import *; print(sorted(set(globals()) - before - {'before'}))"
    assert seen(code) == "['__version__', 'disable', 'enable', 'step']"
    assert seen("import advisor; print(all(hasattr(advisor, name) for name in dir(advisor)))") == "True"
