"""The memory mode, in the child: what is kept goes on, and one step is watched for what it holds (profiling/inside/held.py)."""

from __future__ import annotations

from advisor.loop.attach import attach_training
from advisor.loop.session import Session
from advisor.profiling.inside.held import LookDriver
from advisor.trials.kept import KeptChanges


def attach_look(session: Session) -> None:
    """In the child, once torch is imported."""
    training, _ = attach_training(session)
    kept = KeptChanges(training, session.kept)
    LookDriver(training, session, kept.settle, lambda: tuple(s.transform.id for s in kept.standing))
