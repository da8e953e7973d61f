"""What a substituted operation costs the host, and in memory: true to the rows."""

from __future__ import annotations

import pytest

from advisor.ops.moments_cases import APART
from benchmark_pages import beside_eager, page


def rows(**second: object) -> list[dict[str, object]]:
    plain = {
        "name": "bn+relu", "pass": "forward", "shape": [256, 64, 112, 112], "dtype": "bfloat16", "advisor_host_us": 30.0,
        "eager_host_us": 20.0, "advisor_peak_bytes": 4 << 20, "eager_peak_bytes": 8 << 20,
    }  # fmt: skip
    return [plain, {**plain, "name": "bn+add+relu", "advisor_host_us": 45.0, **second}]


def section(*found: dict[str, object]) -> list[str]:
    return beside_eager.section(page.measured_families(found)).splitlines()


def test_a_line_a_family_and_one_for_all() -> None:
    lines = section(*rows(advisor_peak_bytes=10 << 20))
    line = " | forward | 2 | +18 | 1 of 2 | 0.88 | 1 of 2 | 1.25 | bn+add+relu bfloat16 256×64×112×112: +2.0 MiB |"
    assert f"| batchnorm_act{line}" in lines
    assert f"| all{line}" in lines
    assert not any("backward |" in found for found in lines)


@pytest.mark.parametrize(
    ("change", "memory"),
    [({}, "0.50 | 0 of 2 | – | |"), ({"advisor_peak_bytes": None, "eager_peak_bytes": None}, "0.50 | 0 of 1 | – | |")],
)
def test_where_nothing_is_over(change: dict[str, object], memory: str) -> None:
    assert section(*rows(**change))[-1].endswith(memory)


def test_rows_without_memory_have_none() -> None:
    one, _ = rows()
    assert section({**one, "advisor_peak_bytes": None})[-1].endswith("| 1 of 1 | – | – | – | |")


def test_what_pytorch_runs_and_comparisons_are_left_out() -> None:
    norm, _ = rows()
    cudnns = {**norm, "name": "bn", "dtype": "float32", "advisor_host_us": 900.0}
    convolution = {**norm, "name": "depthwise k5 s1+bn+relu", "shape": [256, 1152, 7, 7]}
    apart = {**convolution, "name": convolution["name"] + APART, "advisor_host_us": 900.0}
    assert section(norm, cudnns, apart)[-1].startswith("| all | forward | 1 | +10 | 1 of 1 |")


def test_host_s_times_that_were_taken_again_are_told() -> None:
    one, other = rows()
    assert not any("taken again" in line for line in section(one, other))
    told = section({**one, "host_date": "2026-11-27"}, {**other, "host_date": "2026-11-26"})
    assert "The host's times of 2 of these 2 rows were taken again by themselves, 2026-11-26 to 2026-11-27." in told
