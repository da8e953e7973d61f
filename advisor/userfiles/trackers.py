"""Experiment trackers in a run that is thrown away: what they would send or write elsewhere is no result of the user's."""

from __future__ import annotations

import os
from pathlib import Path


def offline(run_dir: Path) -> dict[str, str]:
    """Variables that keep experiment trackers from the network and from the user's own tracking folders; what is switched off stays off."""
    folder = run_dir.resolve() / "trackers"
    folder.mkdir(parents=True, exist_ok=True)
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": folder.joinpath("mlruns").as_uri(),
        "COMET_MODE": "offline",
        "COMET_OFFLINE_DIRECTORY": str(folder),
        "NEPTUNE_MODE": "offline",
        "CLEARML_OFFLINE_MODE": "1",
        "SWANLAB_MODE": "offline",
        "SWANLAB_LOG_DIR": str(folder),
        "TRACKIO_DIR": str(folder),
    }
    return {name: value for name, value in variables.items() if os.environ.get(name) != "disabled"}
