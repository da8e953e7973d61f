"""What is dispatched without a row, and what is asked of size: as the specs and the rows have it."""

from __future__ import annotations

from advisor.ops import catalog
from benchmark_pages import inferred, page


def row(name: str, *shape: int) -> dict[str, object]:
    return {"name": name, "pass": "forward", "shape": list(shape), "dtype": "bfloat16"}


ROWS = (row("bn+relu", 256, 64, 112, 112), row("bn+relu", 128, 512, 4, 4), row("bn+silu", 256, 64, 112, 112))


def test_every_entry_of_a_measured_family_is_shown() -> None:
    text = inferred.section(page.measured_families(ROWS))
    listed = [line for line in text.splitlines() if line.startswith("| batchnorm_act | bn")]
    norms = catalog.get("batchnorm_act")
    assert len(listed) == len(norms.inferred)
    for line, entry in zip(listed, norms.inferred, strict=True):
        assert all(name in line for name in (*entry.names, *entry.dtypes, entry.like))
        assert line.endswith(f"| {entry.because} |")
    assert "| batchnorm_act | bn+relu6 | float32, float16 | bn+relu |" in text
    assert "bn+silu forked | float16, float32 | the same in bfloat16 |" in text
    assert "squeeze_excite" not in text


def test_sizes_are_the_smallest_that_was_measured() -> None:
    kinds = len(catalog.get("batchnorm_act").kinds)
    line = f"| batchnorm_act | nothing | {kinds} | 2 | bn+relu bfloat16 128×512×4×4 | 2.00 MiB |"
    assert line in inferred.section(page.measured_families(ROWS))
    lost = [row("bn+relu one launch", 128, 128, 16, 16)]  # of a way that is not taken there
    assert f"| batchnorm_act | nothing | {kinds} | 0 | – | – |" in inferred.section(page.measured_families(lost))
