"""The Jupyter extension: `%load_ext advisor`, then `%%advisor profile` above a cell that trains."""

from __future__ import annotations

import html
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from advisor.core.cache import SESSION
from advisor.profiling.beside.notebooks import definitions, written

COMMANDS = ("profile", "apply")  # over a cell
BESIDE = (
    "compare",
    "doctor",
    "explain",
    "plan",
    "report",
    "rules",
    "runs",
    "undo",
)  # on a line of their own: they start no script
_FRAME = '<iframe srcdoc="{page}" style="width:100%;height:720px;border:1px solid #ccc;border-radius:6px"></iframe>'


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext advisor`: registers the magic."""

    def advisor(line: str, cell: str) -> Any:
        return run(shell, line, cell)

    advisor.__doc__ = run.__doc__
    shell.register_magic_function(advisor, magic_kind="cell", magic_name="advisor")
    shell.register_magic_function(run_line, magic_kind="line", magic_name="advisor")


def run_line(line: str) -> None:
    """%advisor runs   or   %advisor plan show, and others that start no script: their output, below the cell."""
    words = shlex.split(line)
    if not words or words[0] not in BESIDE:
        print(
            f"advisor: {' '.join(words[:1])!r} is no command for a line; write one of {', '.join(BESIDE)}, "
            f"or `%%advisor profile` above the cell that trains",
            file=sys.stderr,
        )
        return
    _told([sys.executable, "-m", "advisor", *words])


def _told(command: list[str], **names: str) -> None:
    """Run it and print what it tells, as it comes; with `names` in place of what they stand for."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None  # asked for above
    with process:
        for told in process.stdout:
            for text, name in names.items():
                told = told.replace(text, name)
            print(told, end="")


def run(shell: Any, line: str, cell: str) -> Any:
    """%%advisor profile [OPTIONS]   or   %%advisor apply --auto [OPTIONS]

    Run the cell as a training script of its own process under advisor, and show the report. The imports, functions, classes and
    assignments of the cells that ran before are there; their loops and calls are not run again.
    """
    words = shlex.split(line) or ["profile"]
    if words[0] not in COMMANDS:
        print(f"advisor: {words[0]!r} is no command for a cell; write one of {', '.join(COMMANDS)}", file=sys.stderr)
        return None
    # This cell may be the last of them already; as a call of a magic it defines nothing.
    earlier = [definitions(text) for text in shell.user_ns.get("In", []) if not text.lstrip().startswith("%%")]
    script = written(SESSION, [*filter(None, earlier), cell], Path.cwd())
    before = set(_reports())
    _told([sys.executable, "-m", "advisor", *words, str(script)], **{str(script): "this cell"})
    new = [path for path in _reports() if path not in before]
    return Shown(max(new, key=lambda path: path.stat().st_mtime)) if new else None


def _reports() -> list[Path]:
    return list(Path("advisor-runs").glob("*/report.html"))


class Shown:
    """A report that a notebook displays. IPython's own HTML object warns of a frame, and its IFrame takes no text."""

    def __init__(self, report: Path) -> None:
        self.report = report

    def _repr_html_(self) -> str:
        return _FRAME.format(page=html.escape(self.report.read_text(encoding="utf-8"), quote=True))

    def __repr__(self) -> str:
        return f"the report {self.report}"
