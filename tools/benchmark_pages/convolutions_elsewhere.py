"""What the other convolution algorithms would gain on other GPUs, from their data sheets: the table of docs/convolutions.md.

    python tools/benchmark_pages/convolutions_elsewhere.py

A time is its bytes at a share of the memory's rate plus its operations at a share of the tensor cores' rate. The shares are those that an
H200 was measured to reach (docs/notes/kernels/convolution-algorithms.md), so its own row shows what the arithmetic leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """`tensor`: TFLOP/s of dense fp16 products with fp32 sums; `vector`: of fp32 without tensor cores; `memory`: TB/s."""

    name: str
    tensor: float
    vector: float
    memory: float


# NVIDIA's data sheets and architecture white papers: A100 80 GB SXM, GeForce RTX 3090 (GA102), RTX 4090 and L40S (AD102), H100 SXM, H200, B200
# (HGX, a GPU), GeForce RTX 5090 (GB202).
CHIPS = (
    Chip("A100 (Ampere)", 312, 19.5, 2.04),
    Chip("RTX 3090 (Ampere)", 71, 35.6, 0.936),
    Chip("RTX 4090 (Ada)", 165, 82.6, 1.008),
    Chip("L40S (Ada)", 362, 91.6, 0.864),
    Chip("H100", 989, 67, 3.35),
    Chip("H200", 989, 67, 4.8),
    Chip("B200 (Blackwell)", 2250, 75, 8.0),
    Chip("RTX 5090 (Blackwell)", 209, 105, 1.79),
)
# 128 images of 28 x 28 between 512 channels, by cuDNN in bf16 0.58 ms; by Winograd, transforms 0.203 ms and products 0.192.
DIRECT = 2 * 9 * 128 * 28 * 28 * 512 * 512 / 1e12  # T operations
PRODUCTS = DIRECT / 4
BYTES = 2 * (1 + 2.25) * 2 * 128 * 28 * 28 * 512 / 1e12  # TB: images read and frequencies written, and back
H200_DIRECT, H200_PRODUCTS, H200_BYTES = (
    DIRECT / 0.582e-3 / 989,
    PRODUCTS / 0.192e-3 / 989,
    BYTES / 0.203e-3 / 4.8,
)
# 31 x 31 taps of 64 x 128 x 56 x 56: operations with the Toeplitz matrices' zeros, and without; cuDNN's are on the vector pipes.
TOEPLITZ, TAPS = 0.076, 0.049


def winograd(chip: Chip) -> float:
    """How many times as fast as cuDNN."""
    own = BYTES / (chip.memory * H200_BYTES) + PRODUCTS / (chip.tensor * H200_PRODUCTS)
    return DIRECT / (chip.tensor * H200_DIRECT) / own


def exact(chip: Chip) -> float:
    """Three products in fp16 against one on the vector pipes, both at their whole rate."""
    return chip.tensor / 3 / chip.vector


def depthwise(chip: Chip) -> float:
    """Products with Toeplitz matrices against the taps on the vector pipes, both at their whole rate."""
    return TAPS / chip.vector / (TOEPLITZ / chip.tensor)


def table() -> str:
    """As Markdown."""
    lines = [
        "| GPU | fp16 operations a byte | Winograd, 512 channels | exact fp32, at most | depthwise 31 x 31, at most |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {chip.name} | {chip.tensor / chip.memory:.0f} | {winograd(chip):.2f} | {exact(chip):.1f} | {depthwise(chip):.1f} |"
        for chip in CHIPS
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
