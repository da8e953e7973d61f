"""What carries gradients between the GPUs of this host, measured: reductions of two sizes, a few seconds.

Run by torchrun in each rank: `python -m torch.distributed.run --standalone --nproc-per-node N -m advisor.distributed.links FILE`; rank 0
writes. A reduction of few bytes takes its latency, one of many what the link carries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from advisor.core import storage
from advisor.core.errors import AdvisorError

SMALL_BYTES, LARGE_BYTES, ROUNDS = 1 << 12, 64 << 20, 20
TIMEOUT_S = 90.0


def measure(ranks: int, file: Path) -> dict[str, float]:
    """{"ranks", "latency_us", "gbps"} of a ring over so many ranks of this host, as analysis/scaling.py has it.

    Raises:
        AdvisorError: where the ranks could not be started, or took too long.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    try:
        ended = subprocess.run(
            [*command, "-m", "advisor.distributed.links", str(file.resolve())],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AdvisorError(
            f"{ranks} ranks have not met within {TIMEOUT_S:g} s", fix="Name the link with --link."
        ) from None
    if ended.returncode or not file.exists():
        last = next((line for line in reversed(ended.stderr.splitlines()) if "Error" in line), "no message")
        raise AdvisorError(f"the link could not be measured ({last.strip()[:200]})", fix="Name it with --link.")
    found: dict[str, float] = json.loads(file.read_text())
    return found


def main(file: str) -> None:
    """One rank."""
    import torch
    from torch import distributed

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if cuda else "gloo")
    ranks = distributed.get_world_size()
    seconds = {}
    for nbytes in (SMALL_BYTES, LARGE_BYTES if cuda else LARGE_BYTES // 16):
        values = torch.zeros(nbytes // 4, device="cuda" if cuda else "cpu")
        taken = []
        for number in range(3 + ROUNDS):
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            distributed.all_reduce(values)
            if cuda:
                torch.cuda.synchronize()
            if number >= 3:
                taken.append(time.perf_counter() - began)
        seconds[nbytes] = sorted(taken)[len(taken) // 2]
    (small_s, large_s), large = seconds.values(), max(seconds)
    latency_us = small_s * 1e6 / (2 * (ranks - 1))
    gbps = 2 * (ranks - 1) / ranks * large / max(large_s - small_s, 1e-9) / 1e9
    if distributed.get_rank() == 0:
        storage.write_text(Path(file), json.dumps({"ranks": ranks, "latency_us": latency_us, "gbps": gbps}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
