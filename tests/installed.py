"""Fresh environments, and what is run in them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path


def run(*words: str | Path, cwd: Path, **variables: str) -> str:
    """What a command prints that ends well, in an environment without variables of Python's or ours."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ADVISOR"))}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(what: Path, folder: Path, *options: str) -> tuple[Path, Path]:
    """Make an environment that holds `what` alone: its bin folder, and where its packages lie."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    installer = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    build_path = os.pathsep.join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    alone = ("--no-deps", "--no-index", "--no-build-isolation")
    run(*installer, *alone, *options, what, cwd=folder, PYTHONPATH=build_path)
    return scripts, Path(purelib)
