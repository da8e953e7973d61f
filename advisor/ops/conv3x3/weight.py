"""How the gradient of a 3 x 3 convolution's weight is cut into blocks. Plain arithmetic.

A job has 64 channels of the one tensor as they are and 32 or 64 of the other through the window of the taps, of one group; the blocks of
all jobs share the tiles of pixels. What each block adds up it leaves for a last sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

PLAIN = 64  # channels of the tensor that is taken as it is, a job
THREADS, SUM_THREADS, SUM_LANES = 416, 256, 32
SHARED_BYTES = 226 * 1024  # for the stages; barriers stand behind them
MAX_STAGES = 8
GROUPED_ROWS = {1: (16, 14, 8), 2: (8,)}  # of a tile of groups, by stride
# Below so many operations and with at most so many jobs of 32 channels the partial sums count: half of them with 32 channels a job (128 images
# of 32x32, 64 to 64 channels, on an H200: 0.95 of the time).
SHORT_FLOPS, SHORT_JOBS = 30e9, 8


@dataclass(frozen=True, slots=True)
class Conv3x3WeightPlan:
    """`lines` blocks a job walk over `tiles` tiles of `rows` x 8 * `wide` pixels: `bands` of rows by `strips` an image.

    `x_windowed`: x is seen through the window, else dy. `columns` of its channels a job.
    """

    x_windowed: bool
    columns: int
    rows: int
    wide: int
    stride: int
    stages: int
    bands: int
    strips: int
    tiles: int
    jobs: int
    lines: int

    @property
    def halo(self) -> int:
        """Rows and columns that a tile's window has beyond its own."""
        return halo(self.stride)

    @property
    def shared_bytes(self) -> int:
        """Of a block: stages, and a KiB for their barriers."""
        return self.stages * _stage_bytes(self.columns, self.rows, self.wide, self.stride) + 1024

    @property
    def quarters(self) -> int:
        """Sums that a block leaves, in fours."""
        return 3 * (3 * self.columns // 8) * 128

    @property
    def left_bytes(self) -> int:
        """Of what all blocks leave, in fp32."""
        return self.lines * self.jobs * self.quarters * 16


def _filled(size: int, by: int) -> float:
    """What `size` becomes when it is filled up to a multiple of `by`."""
    return -(-size // by) * by / size


def halo(stride: int) -> int:
    """Rows and columns that a tile reads beyond its own."""
    return 2 if stride == 1 else 1


def _stage_bytes(columns: int, rows: int, wide: int, stride: int) -> int:
    window = (rows + halo(stride)) * (8 * wide + halo(stride)) * columns * 2
    return (1 if stride == 1 else 4) * -(-window // 1024) * 1024 + rows * wide * 8 * 2 * PLAIN


@lru_cache(maxsize=4096)
def plan(
    batch: int,
    inputs: int,
    outputs: int,
    height: int,
    width: int,
    sm_count: int,
    groups: int = 1,
    stride: int = 1,
) -> Conv3x3WeightPlan:
    """The launch that was measured to be fastest, or near it, on an H200 for sizes like these: `height` x `width` of dy."""
    if groups > 1 or stride > 1 or inputs % 32 or outputs % 32:
        x_windowed, columns = True, 32 if inputs <= 32 else 64
        plain_jobs = windowed_jobs = 1
        wide = 2 if stride == 1 and _filled(width, 16) <= _filled(width, 8) else 1
        rows = min(GROUPED_ROWS[stride], key=lambda rows: _filled(height, rows))
    else:
        x_windowed = inputs <= outputs and outputs >= PLAIN
        windowed, plain = (inputs, outputs) if x_windowed else (outputs, inputs)
        plain_jobs = -(-plain // PLAIN)
        short = (
            18 * batch * height * width * inputs * outputs < SHORT_FLOPS and plain_jobs * (windowed // 32) <= SHORT_JOBS
        )
        columns = 32 if short or windowed % 64 else 64
        windowed_jobs = windowed // columns
        wide = 2 if _filled(width, 16) <= _filled(width, 8) else 1
        if _filled(height, 14) < _filled(height, 16):
            rows = 14 if short or columns == 64 else 28
            wide = 1 if columns == 32 else wide
        else:
            rows = 8 if columns == 32 and wide == 2 else 16
    stages = min(MAX_STAGES, SHARED_BYTES // _stage_bytes(columns, rows, wide, stride))
    bands, strips = -(-height // rows), -(-width // (8 * wide))
    tiles = batch * bands * strips
    jobs = plain_jobs * windowed_jobs * groups
    lines = max(1, min(sm_count // jobs, tiles))
    return Conv3x3WeightPlan(x_windowed, columns, rows, wide, stride, stages, bands, strips, tiles, jobs, lines)
