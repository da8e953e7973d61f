"""What the collectors saw in the traced window, normalised: no interpretation here.

All times are nanoseconds on one clock (Kineto's, which is CLOCK_REALTIME-based). Events are stored in columns, so that
a million of them stay small; `index` into a column is an event's identity within its table.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """Operators and annotations on host threads, ordered by start.

    `annotation` holds "" for an operator; "module:<path>|<type>" for a module's forward; "line:<file>:<line>" for the
    user's source line that called into torch; "step:<n>" for a step boundary; "user:<name>" for a `record_function` of
    torch itself or of the script. `sequence` is autograd's sequence number (-1 if none); `forward_thread` is the thread
    of the forward op when the event is its backward (0 otherwise).
    """

    name: list[str] = field(default_factory=list)
    start_ns: list[int] = field(default_factory=list)
    end_ns: list[int] = field(default_factory=list)
    thread: list[int] = field(default_factory=list)
    correlation: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    forward_thread: list[int] = field(default_factory=list)
    annotation: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)  # JSON text of nested lists; "" if not recorded
    dtypes: list[str] = field(default_factory=list)
    strides: list[str] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)  # JSON list of the arguments that are no tensors; "" if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeTable:
    """CUDA runtime and driver calls on host threads (launches, copies, synchronisations)."""

    name: list[str] = field(default_factory=list)
    start_ns: list[int] = field(default_factory=list)
    end_ns: list[int] = field(default_factory=list)
    thread: list[int] = field(default_factory=list)
    correlation: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTable:
    """Kernels, copies and memsets on the device. `correlation` joins with RuntimeTable, `op` with OpTable.correlation."""

    name: list[str] = field(default_factory=list)
    start_ns: list[int] = field(default_factory=list)
    end_ns: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    correlation: list[int] = field(default_factory=list)
    op: list[int] = field(default_factory=list)
    grid: list[str] = field(default_factory=list)  # "132x1x1"; "" if not known
    block: list[str] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)  # copies and memsets; 0 for kernels
    device: list[int] = field(default_factory=list)  # the GPU's number in the process


@dataclass(frozen=True, slots=True, kw_only=True)
class DramSamples:
    """Hardware-counter samples: bytes moved between GPU and its memory in each interval."""

    start_ns: list[int] = field(default_factory=list)
    end_ns: list[int] = field(default_factory=list)
    read_bytes: list[float] = field(default_factory=list)
    write_bytes: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The traced window. `step_bounds_ns` has n+1 host times for n traced steps."""

    device: str  # "cuda" or "cpu"
    step_bounds_ns: list[int]
    ops: OpTable = field(default_factory=OpTable)
    runtime: RuntimeTable = field(default_factory=RuntimeTable)
    kernels: DeviceTable = field(default_factory=DeviceTable)
    dram: DramSamples = field(default_factory=DramSamples)
    launches: int = 0  # launch calls seen
    launches_matched: int = 0  # of those, with a device record: coverage = matched / launches
    roles: dict[str, str] = field(default_factory=dict)  # source line → its phase, where the line itself tells it
    notes: list[str] = field(default_factory=list)
