"""What holds a step's memory, by kind, module and line."""

from __future__ import annotations

from dataclasses import dataclass, field

HELD_FILE = "held.json"
ACTIVATION = "activation"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRow:
    """Tensors of one kind, made in one module's forward at one line. `freed_us`: not told, of what outlives a step."""

    kind: str  # activation; parameter, gradient, optimizer, buffer, batch
    module: str = ""  # "Net.layer1.0"; "" outside of models
    source: str = ""  # "train.py:42"
    nbytes: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCost:
    """A module that is called in the step: its forward's time, and what its forward keeps for the backward in all."""

    module: str
    forward_us: float
    held_bytes: int
    input_bytes: int  # what a recomputation has to keep of it
    submodules: int
    calls: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLook:
    """One step. `peak_bytes` and `reserved_bytes` are the device allocator's over it; 0 on a CPU, which has none."""

    rows: tuple[HeldRow, ...] = ()
    modules: tuple[ModuleCost, ...] = ()
    device: str = "cpu"
    peak_bytes: int = 0
    reserved_bytes: int = 0
    total_bytes: int = 0  # of the device
    step_us: float = 0.0
    batch_size: int = 0
    steps: int = 0
    applied: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def of(self, kind: str) -> int:
        """Bytes of a kind."""
        return sum(row.nbytes for row in self.rows if row.kind == kind)

    @property
    def known_bytes(self) -> int:
        """All that the rows tell."""
        return sum(row.nbytes for row in self.rows)

    @property
    def most_bytes(self) -> int:
        """The peak, or where no allocator tells one, what is held when the backward begins."""
        return self.peak_bytes or self.known_bytes
