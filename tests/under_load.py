"""The suite several times over, each in an order of its own, beside busy processes: `make test-load`.

What fails here and not in `make test` depends on its neighbours, or on how fast or steady the machine is. Ten runs take two hours on two
cores: `--runs 1 --seed 3 --part 2/4` is a quarter of the third, and `--runs 0` only says which files those are.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SUITE = ["--dist", "loadfile", "--no-loadscope-reorder", "-m", "not gpu and not long", "-q"]


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def files_of(part: str) -> list[str]:
    """Of "2/4" the second of each four test files: `make test`'s files, dealt in the order of their names."""
    number, of = (int(word) for word in part.split("/"))
    if not 1 <= number <= of:
        raise ValueError(part)
    files = (path for path in TESTS.rglob("test_*.py") if not path.name.endswith("_gpu.py"))
    return sorted(os.path.relpath(path) for path in files)[number - 1 :: of]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; later ones count on")
    parser.add_argument("--part", type=files_of, default="1/1", metavar="K/N", help="the K-th of N parts of the files")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--busy", type=int, default=2, help="processes that compute beside the suite")
    parser.add_argument("more", nargs="*", help="for pytest")
    chosen = parser.parse_args()
    if not chosen.runs:
        print("\n".join(chosen.part))
    failed = []
    for seed in range(chosen.seed, chosen.seed + chosen.runs):
        order = ["--random-order", "--random-order-seed", str(seed)]
        began = time.monotonic()
        with busy_processes(chosen.busy):
            code = subprocess.run(
                [sys.executable, "-m", "pytest", "-n", str(chosen.workers), *SUITE, *order, *chosen.more, *chosen.part],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            ).returncode
        print(f"seed {seed}: {'failed' if code else 'passed'} in {time.monotonic() - began:.0f} s", flush=True)
        failed += [seed] if code else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
