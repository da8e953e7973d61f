"""The machine that tests run on, as advisor knows it: its rates are planted, in a cache folder of the tests' own.

A command that is started in a test would measure them first, for seconds, and on a machine as busy as two workers make it would not trust
what it found, nor keep it for the next one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.core.cache import cache_dir
from advisor.core.environment import Environment
from advisor.profiling.machine import environment

COPY_GBPS, MATRIX_TFLOPS = 10.0, {"fp32": 0.1, "bf16": 0.4}
# Variables by which kept rates are told apart, as tests set them for what they start.
STARTED_WITH = tuple(
    {"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": gpus} for threads in (None, "1") for gpus in (None, "")
)


def cache_folder() -> Path:
    """This user's alone, since what lies there is loaded; stays, with what was compiled, for the next run."""
    folder = Path(tempfile.gettempdir()) / f"advisor-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077 or folder.is_symlink():
        return Path(tempfile.mkdtemp(prefix="advisor-tests-"))
    return folder


def own_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A cache folder of the test's own, in which this machine is known too."""
    known = list(cache_dir().glob("environment-*.json"))
    patch.setenv("XDG_CACHE_HOME", str(folder))
    cache_dir().mkdir(parents=True, exist_ok=True)
    for path in known:
        shutil.copy2(path, cache_dir())


def plant() -> None:
    """Whoever is started from here finds this machine measured. Not where there is a GPU, whose rates tests ask for."""
    facts: Environment | None = None
    for variables in STARTED_WITH:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
            known = environment.kept()
            if known is not None and (known.copy_gbps, known.matrix_tflops) == (COPY_GBPS, MATRIX_TFLOPS):
                continue
            import torch

            if torch.cuda.is_available():
                return
            facts = facts or environment.host_facts()
            rates = {"copy_gbps": COPY_GBPS, "matrix_tflops": MATRIX_TFLOPS}
            environment.keep(replace(facts, **rates, rates_provenance=environment.MEASURED))
