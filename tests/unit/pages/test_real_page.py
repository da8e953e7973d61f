"""The page of real trainings: what it says of each, and of all."""

from __future__ import annotations

import dataclasses

from advisor.bench.real import RealRow
from benchmark_pages import real_page

FAST = RealRow(
    name="raft", proved=True, first_proof_s=62.4, plain_ms=160.0, advisor_ms=80.0, speedup=2.0, speedup_low=1.9, speedup_high=2.1,
    device_speedup=2.5, device_speedup_low=2.4, device_speedup_high=2.6, hand_speedup=1.4, kept=("amp_bf16", "cuda_graphs"),
    not_kept=("tf32: reverted, no gain",), detail="losses alike", apply_s=118.0, torch="2.11", date="2026-11-27",
)  # fmt: skip
NOTHING = RealRow(name="cut", fault="no such file", torch="2.11", date="2026-11-27")


def page(*rows: RealRow) -> str:
    return real_page.page(
        {"gpu": "Some GPU", "torch": "2.11", "cuda": "13", "rows": [dataclasses.asdict(r) for r in rows]}
    )


def test_a_row_says_what_was_proved_and_what_was_not() -> None:
    text = page(FAST, NOTHING)
    assert (
        "| raft | yes | 2.00 (1.90 to 2.10) | 2.50 (2.40 to 2.60) | 62 s | 160.0 | 80.0 | 1.40 × | amp_bf16, cuda_graphs | 118 s | 2026-11-27 |"
        in text
    )
    assert "| cut | no | – | – | – | – | – | – | nothing | – | 2026-11-27 |" in text
    assert "- **raft**: losses alike\n  - tf32: reverted, no gain" in text
    assert "- **cut**\n  - no result: no such file" in text


def test_the_mean_is_of_all_and_one_without_a_proof_counts_as_it_was() -> None:
    assert "1 of 2 proved; 1.41 times as fast" in page(FAST, NOTHING)
    assert "the first plan after 62 s (median), 62 s at worst" in page(FAST, NOTHING)
    assert "0 of 1 proved." in page(NOTHING)
