"""compute-sanitizer over every family's verification cases, our kernels only: `make sanitize`, on a machine with a GPU.

    python tests/kernels/sanitize.py [--tool memcheck] [--seconds 300] [FAMILY ...]
    make sanitize SANITIZE="--tool initcheck pooling"

What each tool found is written to docs/benchmarks/<gpu>/sanitizer.json as soon as it is known, in the place of what was there.

memcheck finds accesses outside allocations, racecheck hazards between threads in shared memory, initcheck reads of device
memory that nobody has written. Torch's caching allocator is off for the first and the last, so that an allocation is one
tensor. memcheck watches the whole verification, with sliced and misaligned tensors; the other two, which are slow and do not
get through some of the libraries' kernels beside, watch our kernels alone, on the smallest case of each: what torch computes
for them comes from the host (`from_host`), so that every read of unwritten memory that initcheck tells of is our own fault.
Exits with 1 when a tool found something, or did not get through.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tools")]

from advisor.bench import results  # noqa: E402 – found by the path set above
from advisor.ops import catalog  # noqa: E402 – found by the path set above
from advisor.ops.family import Case, Family  # noqa: E402 – found by the path set above
from benchmark_pages import checks  # noqa: E402 – found by the path set above

SANITIZER = "compute-sanitizer"
AT_ONCE = 8  # each holds some GB of device memory and one core
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_FRAME = re.compile(r"Host Frame|host backtrace|=========\s*$")


def check(tool: str, family: Family, seconds: float) -> tuple[bool, str]:
    """Whether the tool has found nothing, and what it says."""
    filters = [f"--kernel-name=kne={entry}" for entry in ours()]
    watched = ["-m", "advisor", "kernels", "verify"] if tool == "memcheck" else [__file__, "--exercise"]
    command = [SANITIZER, "--tool", tool, *filters, sys.executable, *watched, family.id]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "0" if tool == "racecheck" else "1"}
    try:
        ended = subprocess.run(command, cwd=REPO, env=environment, timeout=seconds, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return False, f"not through in {seconds:g} s"
    return judged(ended.stdout + ended.stderr, ended.returncode)


def ours() -> tuple[str, ...]:
    """Names of all families' kernels: a family may launch another's beside its own, whose writes initcheck must see."""
    return tuple(dict.fromkeys(entry for f in catalog.FAMILIES for entries in f.kernels.values() for entry in entries))


def chosen(family: Family) -> list[Case]:
    """Of the verification cases as few and as small ones as bring every kernel in every dtype, and every variant once."""
    covered: set[tuple[str, str]] = set()
    cases = []
    for case in sorted(family.verification, key=lambda case: math.prod(case.shape)):
        brought = {(kernel, case.dtype) for work in case.passes.values() for kernel in work.kernels} | {("", case.name)}
        if not brought <= covered:
            covered |= brought
            cases.append(case)
    return cases


def exercise(family: Family, device: str) -> None:
    """Run the kernels of the chosen cases once, forward and backward, and compare nothing.

    Everything else is computed on the CPU and comes by copies: inputs, gradients, zeroed counters, and what PyTorch's own
    operations do in between (a convolution's gradient beside a kernel for the other one).

    Raises:
        RuntimeError: when a case runs none.
    """
    import torch
    from from_host import FromHost, put

    from advisor.ops import dispatch, verify

    for number, case in enumerate(chosen(family)):
        before = sum(family.engaged.values())
        arguments = [
            put(a, device) if isinstance(a, torch.Tensor) else a
            for a in case.inputs(verify.seeded("cpu", number), case.shape[0])
        ]
        with dispatch.everything(), FromHost(device):
            outputs = verify.tensors(case.ours(*arguments))
            leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
            if leaves and "backward" in case.passes:
                torch.autograd.grad(outputs, leaves, [torch.randn_like(y) for y in outputs], allow_unused=True)
        if sum(family.engaged.values()) == before:
            raise RuntimeError(f"{case.label}: {dispatch.told(family.id)}")
    if device == "cuda":
        torch.cuda.synchronize()


def judged(text: str, exit_code: int) -> tuple[bool, str]:
    """The same from what it printed. No summary is no proof."""
    found = _SUMMARY.search(text)
    if found is None:
        return False, f"no summary; exit code {exit_code}: {text.strip()[-300:]}"
    if int(found.group(1)):
        told = [line for line in text.splitlines() if line.startswith("=========") and not _FRAME.search(line)]
        told = list(dict.fromkeys(told))
        return False, "\n".join([found.group(0), *told[:12]])
    return (True, "clean") if exit_code == 0 else (False, f"clean, but verification fails: {text.strip()[-300:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="ids of `advisor kernels list`; default: all")
    parser.add_argument("--tool", action="append", choices=tuple(checks.TOOLS), help="default: all three")
    parser.add_argument("--exercise", action="store_true", help="no tool: run each case's kernels once, here")
    parser.add_argument("--seconds", type=float, default=300.0, help="for one family and tool")
    asked = parser.parse_args()
    families = [catalog.get(name) for name in asked.families] or list(catalog.FAMILIES)
    if asked.exercise:
        for family in families:
            exercise(family, "cuda")
        return 0
    if shutil.which(SANITIZER) is None:
        parser.error(f"{SANITIZER} is not installed; it comes with the CUDA toolkit")
    file = results.folder() / checks.FILE
    clean = True
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pairs = {
            pool.submit(check, tool, family, asked.seconds): (tool, family)
            for tool, family in product(asked.tool or checks.TOOLS, families)
        }
        for ended in as_completed(pairs):
            (tool, family), (passed, text) = pairs[ended], ended.result()
            clean &= passed
            print(f"{tool:10} {family.id:20} {text}", flush=True)
            results.write(
                file, "sanitizer", checks.merged(results.on_file(file), checks.row(family, tool, passed, text))
            )
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
