"""The Jupyter extension: `%load_ext advisor`, then `%%advisor profile` above a cell that trains."""

from __future__ import annotations

import html
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from advisor.loop.sources import SESSION
from advisor.profiling.beside.notebooks import definitions, written

COMMANDS = ("profile", "apply")
_FRAME = '<iframe srcdoc="{page}" style="width:100%;height:720px;border:1px solid #ccc;border-radius:6px"></iframe>'


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext advisor`: registers the magic."""

    def advisor(line: str, cell: str) -> Any:
        return run(shell, line, cell)

    advisor.__doc__ = run.__doc__
    shell.register_magic_function(advisor, magic_kind="cell", magic_name="advisor")


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
    command = [sys.executable, "-m", "advisor", *words, str(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None  # asked for above
    with process:
        for told in process.stdout:
            print(told, end="")
    new = [path for path in _reports() if path not in before]
    return _shown(max(new, key=lambda path: path.stat().st_mtime)) if new else None


def _reports() -> list[Path]:
    return list(Path("advisor-runs").glob("*/report.html"))


def _shown(report: Path) -> Any:
    from IPython import display

    html_of: Any = display.HTML
    return html_of(_FRAME.format(page=html.escape(report.read_text(encoding="utf-8"), quote=True)))
