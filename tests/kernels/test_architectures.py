"""What depends on a GPU's architecture is one table: a new one is a row of it, and nothing else asks for a number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import pytest
from emulation.device import forget_launches

from advisor.core import architectures
from advisor.core.architectures import Architecture
from advisor.ops import catalog, dispatch_table, shared_memory, sources, verify
from advisor.ops.family import Case, Family
from advisor.resources import kernels_dir

REPO = kernels_dir().parent
SIX = (80, 86, 89, 90, 100, 120)
# A comparison of an architecture, or of a compute capability, with a number of its own.
_NUMBER = re.compile(
    r"(?:\w*arch|capability)(?:\(\w*(?:\.\w+)*\))?\)?(?:\[0\])? *(?:[!=]=|[<>]=?|(?:not )?in) *(?:[(\[{]\d|[1-9]\d{1,2}\b|[5-9]\b)"
)
_OLD = re.compile(r"\b(?:NEEDS_ARCH|ROOMY_ARCH|_STREAMS_ON|_KIB|_H200_SMS)\b|\b_?SMS = \d")


@pytest.fixture
def with_row(monkeypatch: pytest.MonkeyPatch) -> Iterator[Architecture]:
    """A row more: shared memory between that of sm_120 and sm_90, clusters, no products of warpgroups, more registers used."""
    row = Architecture(sm=130, shared_kib=120, sms=64, clusters=True, bulk_copies=True, early_launches=True, roomy=True)
    with monkeypatch.context() as patch:
        patch.setattr(architectures, "ROWS", (*architectures.ROWS, row))
        _forget()
        yield row
    _forget()


def _forget() -> None:
    architectures.of.cache_clear()
    dispatch_table.layers.cache_clear()
    forget_launches()


def test_a_row_is_all_that_an_architecture_needs(emulated, with_row: Architecture) -> None:
    """Families take it with its shared memory, and leave it what needs products that it lacks."""
    emulated.use(sm_count=2, arch=with_row.sm)
    assert shared_memory.of_a_block(with_row.sm) == 120 * 1024
    assert dispatch_table.layers()[with_row.sm].startswith("like sm_90")
    taken = {name: sources.lacks(name, with_row.sm) for family in catalog.FAMILIES for name in family.kernels}
    assert {name for name, reason in taken.items() if reason} == {name for name in taken if sources.target(name)}
    for family in catalog.FAMILIES:
        assert family.variants(with_row.sm)
    seen = []
    for name in ("strided_pointwise", "conv3x3", "prelu"):
        family = catalog.get(name)
        found = verify.check(family, _smallest(family), "cpu")
        assert found["passed"] is not False, found["detail"]
        seen.append(found["passed"])
    assert seen == [True, None, True]  # the second is left to PyTorch, and says for which architecture


def _smallest(family: Family) -> Case:
    return min(family.verification, key=lambda case: sum(work.nbytes for work in case.passes.values()))


def test_the_table_has_what_users_have() -> None:
    assert {row.sm for row in architectures.ROWS} >= set(SIX)
    assert [architectures.of(sm).shared_kib for sm in SIX] == [163, 99, 99, 227, 227, 99]
    assert [architectures.of(sm).clusters for sm in SIX] == [False, False, False, True, True, True]
    assert [architectures.of(sm).warpgroups for sm in SIX] == [False, False, False, True, False, False]


@pytest.mark.parametrize(("sm", "like", "kib"), [(88, 87, 99), (95, 90, 99), (200, 121, 99), (50, 60, 48)])
def test_an_unknown_one_is_taken_for_the_nearest_older_with_less(sm: int, like: int, kib: int) -> None:
    found, nearest = architectures.of(sm), architectures.of(like)
    assert (found.sm, found.shared_kib) == (sm, kib)
    assert (found.clusters, found.threads) == (nearest.clusters, nearest.threads)
    assert not found.warpgroups
    assert not found.streams


def test_a_source_needs_what_its_headers_have() -> None:
    for name in sources.all_names():
        text = sources.source(name)
        assert ("wgmma.mma_async" in text) == ("warpgroups" in sources.needs(name)) == bool(sources.target(name))
        assert ("mapa." in text) == ("clusters" in sources.needs(name))
        assert ("cp.async.bulk" in text or "mbarrier." in text) == ("bulk_copies" in sources.needs(name))
        assert ("griddepcontrol" in text) == sources.overlaps(name)


def test_nothing_else_compares_an_architecture_with_a_number() -> None:
    for planted in (
        "if arch >= 90:",
        "if nvrtc.arch(device) != 90",
        "if torch.cuda.get_device_capability(d) < (8, 0)",
        "arch in {90}",
    ):
        assert _NUMBER.search(planted), planted
    files = (path for path in (REPO / "advisor").rglob("*.py") if path.name != "architectures.py")
    for path, expression in product(files, (_NUMBER, _OLD)):
        assert not expression.search(path.read_text()), (path, expression.search(path.read_text()))
