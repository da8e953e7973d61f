"""The suite several times over, each in an order of its own, beside two busy processes: `make test-load`.

What fails here and not in `make test` depends on its neighbours, or on how fast or steady the machine is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

BUSY = 2
SUITE = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not gpu and not long", "-q"]


@contextlib.contextmanager
def busy_processes() -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; later ones count on")
    parser.add_argument("more", nargs="*", help="for pytest")
    chosen = parser.parse_args()
    failed = []
    for seed in range(chosen.seed, chosen.seed + chosen.runs):
        order = ["--random-order", "--random-order-seed", str(seed)]
        began = time.monotonic()
        with busy_processes():
            code = subprocess.run(
                [sys.executable, "-m", "pytest", *SUITE, *order, *chosen.more],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            ).returncode
        print(f"seed {seed}: {'failed' if code else 'passed'} in {time.monotonic() - began:.0f} s", flush=True)
        failed += [seed] if code else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
