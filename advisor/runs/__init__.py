"""Run folders: made, found by their name, read, listed and cleared away."""

from advisor.runs.folders import (
    FINDINGS_FILE,
    PROFILE_FILE,
    REPORT_FILE,
    RUNS_DIR,
    LoadedRun,
    existing,
    find_plan,
    is_empty,
    load_profile,
    load_proof,
    load_run,
    new_run_dir,
)

__all__ = [
    "FINDINGS_FILE",
    "PROFILE_FILE",
    "REPORT_FILE",
    "RUNS_DIR",
    "LoadedRun",
    "existing",
    "find_plan",
    "is_empty",
    "load_profile",
    "load_proof",
    "load_run",
    "new_run_dir",
]
