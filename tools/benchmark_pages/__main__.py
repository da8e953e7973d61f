"""docs/benchmarks and the README's table, made anew: `python tools/benchmark_pages`."""

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tools")]

from benchmark_pages import page  # noqa: E402 – found by the path set above

if __name__ == "__main__":
    page.write(REPO)
