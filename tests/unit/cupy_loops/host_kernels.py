"""A backend that runs the CUDA source of fused kernels on this machine's CPU: compiled by g++, thread by thread, on NumPy's arrays."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from advisor.cupy_loops.replay import fused
from advisor.cupy_loops.replay.arena import Arena, Plain
from advisor.cupy_loops.replay.calls import Program, Step
from advisor.cupy_loops.replay.memory import pointer, samples

COMPILER = shutil.which("g++")
_HEADER = """
#include <cmath>
#include <cstring>
using namespace std;
struct Index { unsigned x, y, z; };
static Index blockIdx, threadIdx;
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __restrict__
static float __int_as_float(int bits) { float f; memcpy(&f, &bits, 4); return f; }
#define ROUNDED(T, t) \\
  static T __##t##add_rn(T a, T b) { return a + b; } static T __##t##sub_rn(T a, T b) { return a - b; } \\
  static T __##t##mul_rn(T a, T b) { return a * b; }
ROUNDED(float, f) ROUNDED(double, d)
"""


def compiled(kernels: list[fused.FusedKernel]) -> ctypes.CDLL:
    """A library with a function `run_NAME(pointers)` for each kernel."""
    runs = ""
    for kernel in kernels:
        types = kernel.source.split(f"{kernel.name}(", 1)[1].split(") {", 1)[0].split(", ")
        given = ", ".join(f"({kind.rpartition(' ')[0]})p[{i}]" for i, kind in enumerate(types))
        threads = f"for (threadIdx.x = 0; threadIdx.x < {fused.THREADS}; ++threadIdx.x)"
        blocks = f"for (blockIdx.x = 0; blockIdx.x < {kernel.blocks}u; ++blockIdx.x)"
        runs += f'extern "C" void run_{kernel.name}(void** p) {{ {blocks} {threads} {kernel.name}({given}); }}\n'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        command = [str(COMPILER), "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fPIC", "-shared", "-x", "c++", "-"]
        text = _HEADER + fused.source(kernels) + runs
        done = subprocess.run([*command, "-o", str(path)], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]
        return ctypes.CDLL(str(path))


class Compiled(Plain):
    """Kernels as they are compiled for a GPU, one thread behind the other."""

    def __init__(self) -> None:
        self.libraries: dict[str, ctypes.CDLL] = {}

    def build(self, program: Program, module: Any, segments: list[tuple[int, int]]) -> Arena:
        arrays, types = samples(program), [str(dtype) for dtype in program.scalar_dtypes]
        steps = [step for plan in program.plans.values() for step in plan if step.kernels]
        kernels = [fused.kernel([fused.body(cluster, arrays, types) for cluster in step.kernels]) for step in steps]
        fresh = list({kernel.name: kernel for kernel in kernels if kernel.name not in self.libraries}.values())
        if fresh:
            library = compiled(fresh)
            self.libraries |= {kernel.name: library for kernel in fresh}
        return super().build(program, module, segments)

    def _kernels(self, arena: Arena, step: Step) -> None:
        if not step.kernels:
            return
        types = [str(scalar.dtype) for scalar in arena.scalars]
        bodies = [fused.body(cluster, arena.at, types) for cluster in step.kernels]
        kernel = fused.kernel(bodies)
        values = [arena.at[p] if p >= 0 else arena.scalars[-1 - p] for each in bodies for p in each.places]
        pointers = (ctypes.c_void_p * len(values))(*(pointer(value) for value in values))
        getattr(self.libraries[kernel.name], f"run_{kernel.name}")(pointers)
