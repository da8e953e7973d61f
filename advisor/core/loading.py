"""How batches are made: what one process of a loader does with its time, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.core.units import percent_text

# What loaders do. `GPU_KINDS` is what a GPU does for a whole batch at once, of 8-bit images that are handed over as they are.
READ, DECODE, RESIZE, COLLATE, HAND_OVER, OTHER = "read", "decode", "resize", "collate", "hand over", "other"
FLIP, CROP, COLOUR, TO_FP32 = "flip", "crop", "colour", "to fp32"
GPU_KINDS = (FLIP, CROP, COLOUR, TO_FP32)
LEAST = 0.05  # of a batch's time: kinds below it are not told
FEWEST = 20  # samples below which shares are not told


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLine:
    """One line of the loader's work. `what` is the class or function that it runs; `time_us` a batch, of one process."""

    source: str  # "data.py:31"
    what: str
    kind: str
    time_us: float

    @property
    def told(self) -> str:
        """`RandomHorizontalFlip, flip`; `resize` where name and kind are one."""
        return self.kind if self.what.lower() == self.kind else f"{self.what}, {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWork:
    """How one process makes its batches: a worker, or the training's own thread where there are none.

    Batches are timed whole by the clock on the wall, `each_us` in order. Where in them the time goes is told by samples of that process's
    stack; `kinds` and `lines` are shares of these samples times the mean batch, in microseconds a batch, the largest first. What a worker
    takes to hand a batch over runs in a thread beside the making and comes on top.
    """

    worker: bool = True
    batches: int = 0
    each_us: tuple[float, ...] = ()
    samples: int = 0
    kinds: dict[str, float] | None = None
    lines: tuple[WorkLine, ...] = ()
    waits_frac: float = 0.0  # of a worker's time, waiting for an order: its queue is full
    cost_frac: float = 0.0  # of its time, that sampling took

    @property
    def batch_us(self) -> float:
        """The mean time to make a batch; 0.0: none was seen."""
        return sum(self.each_us) / len(self.each_us) if self.each_us else 0.0

    @property
    def told(self) -> bool:
        """Whether there are samples enough to say where the time goes."""
        return self.samples >= FEWEST and self.batch_us > 0

    def shares_text(self) -> str:
        """`decode 56 %, resize 36 %`: the kinds that take a twentieth of a batch or more."""
        shares = [(kind, time_us / self.batch_us) for kind, time_us in (self.kinds or {}).items()]
        return ", ".join(f"{kind} {percent_text(share)}" for kind, share in shares if share >= LEAST)

    def for_gpu(self) -> tuple[WorkLine, ...]:
        """The lines whose work a GPU could do on whole batches."""
        return tuple(line for line in self.lines if line.kind in GPU_KINDS) if self.told else ()
