"""What holds a step's memory, by kind, module and line."""

from __future__ import annotations

from dataclasses import dataclass, field

HELD_FILE = "held.json"
ACTIVATION = "activation"
OUTSIDE, OTHERS = "outside of models", "other modules"  # in a course: kept by no module, by those that keep least


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
    weight_bytes: int = 0  # of its parameters, and those below it
    renewed_bytes: int = 0  # of a norm: of its output, or an activation's behind it, that somebody keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class CourseLayer:
    """One layer of a course: what holds it, and how many bytes at each of its times."""

    name: str
    kind: str  # as HeldRow.kind
    nbytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCourse:
    """How what a step holds grows and shrinks. Times are the host's, which allocates and frees, from the step's start."""

    at_us: tuple[float, ...] = ()
    layers: tuple[CourseLayer, ...] = ()  # from what always stays to what comes and goes; activations by module
    allocated_bytes: tuple[int, ...] = ()  # all that the device's allocator has given out at these times; none on a CPU
    backward_us: float = 0.0  # when the backward began; 0 where none was seen
    length_us: float = 0.0


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
    course: MemoryCourse | None = None
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
