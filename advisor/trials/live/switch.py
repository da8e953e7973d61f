"""A candidate switched on and off in the running loop."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.core.stderr import say
from advisor.loop.training import Training
from advisor.transforms.base import Transform
from advisor.trials.kept import StandingChange


class Unclean(Exception):
    """The loop is not what it is taken for, or the device in error for good: the process is no basis for further trials."""


class OtherModel(Exception):
    """The script trains another model than the one that the trial began with."""


@dataclass(slots=True, eq=False)
class Switch:
    """On: what the candidate cannot stand beside is off. Off: the loop as it stood before."""

    training: Training
    transform: Transform
    parameters: dict[str, str]
    rivals: list[StandingChange]
    standing: StandingChange | None = None

    @property
    def is_on(self) -> bool:
        """The candidate is part of the loop."""
        return self.standing is not None

    def on(self) -> None:
        """Apply the candidate in the place of its rivals; nothing when it is on.

        Raises:
            Unclean: when a rival could not be taken back, or put back on. Whatever the candidate raises; then they are on again.
        """
        if self.standing is not None:
            return
        for rival in reversed(self.rivals):
            _take_back(rival)
        try:
            undo = self.transform.apply(self.training, self.parameters)
        except BaseException:
            self._rivals_on()
            raise
        self.standing = StandingChange(self.transform, self.parameters, undo)

    def off(self) -> None:
        """Take the candidate back; nothing when it is off.

        Raises:
            Unclean: when it could not be taken back, or a rival not put back on.
        """
        if self.standing is None:
            return
        standing, self.standing = self.standing, None
        _take_back(standing)
        self._rivals_on()

    def _rivals_on(self) -> None:
        lost = ""
        for rival in self.rivals:
            try:
                rival.undo = rival.transform.apply(self.training, rival.parameters)
            except Exception as error:
                lost = lost or f"{rival.transform.id} could not be put back on: {without_advice(error)}"
        if lost:
            raise Unclean(lost)


def without_advice(error: BaseException) -> str:
    """What an error says, without the advice behind it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _take_back(standing: StandingChange) -> None:
    try:
        standing.undo.run()
    except Exception as error:
        told = f"{standing.transform.id} could not be taken back: {without_advice(error)}"
        say(told)
        raise Unclean(told) from error
