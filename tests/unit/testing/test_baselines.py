"""Baselines on disk: written whole, read back the same, refused when they are not what they should be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gpu_profile import H200, PROFILE

from advisor.core import storage
from advisor.core.errors import AdvisorError
from advisor.testing import baselines
from advisor.testing.baselines import Baseline, BaselineEntry, Machine, compared
from advisor.testing.measured import Measured
from advisor.testing.quantities import BY_KEY

MACHINE = Machine.of(H200)
ENTRY = Measured(PROFILE).entry


def test_what_is_stored_is_read_back(tmp_path: Path) -> None:
    path = baselines.save(tmp_path, "main", MACHINE, {"tests/test_a.py::test": [ENTRY]}, update=False)
    assert path == tmp_path / "main.json"
    loaded = baselines.load(tmp_path, "main")
    assert loaded.tests == {"tests/test_a.py::test": (ENTRY,)}
    assert loaded.machine == MACHINE


def test_an_update_keeps_what_this_run_did_not_measure(tmp_path: Path) -> None:
    baselines.save(tmp_path, "main", MACHINE, {"a": [ENTRY], "b": [ENTRY]}, update=False)
    newer = replace(ENTRY, values={"kernels": 1.0})
    baselines.save(tmp_path, "main", MACHINE, {"b": [newer]}, update=True)
    assert baselines.load(tmp_path, "main").tests == {"a": (ENTRY,), "b": (newer,)}
    baselines.save(tmp_path, "main", MACHINE, {"b": [newer]}, update=False)
    assert set(baselines.load(tmp_path, "main").tests) == {"b"}


def test_an_update_on_another_machine_mixes_nothing(tmp_path: Path) -> None:
    baselines.save(tmp_path, "main", MACHINE, {"a": [ENTRY]}, update=False)
    other = replace(MACHINE, host="other")
    with pytest.raises(AdvisorError, match=r"1 of its 1 tests were not measured here, as a.*--perf-save=main"):
        baselines.save(tmp_path, "main", other, {"b": [ENTRY]}, update=True)
    assert baselines.load(tmp_path, "main").machine == MACHINE
    baselines.save(tmp_path, "main", other, {"a": [ENTRY], "b": [ENTRY]}, update=True)
    assert baselines.load(tmp_path, "main").machine == other
    assert set(baselines.load(tmp_path, "main").tests) == {"a", "b"}


def test_the_newest_is_the_one_stored_last(tmp_path: Path) -> None:
    for name, created in (("one", "2026-01-02T00:00:00Z"), ("two", "2026-01-01T00:00:00Z")):
        storage.save(tmp_path / f"{name}.json", Baseline(name=name, created=created, advisor="0", machine=MACHINE))
    assert baselines.newest(tmp_path) == "one"


def test_what_is_missing_is_told_with_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(AdvisorError, match="--perf-save=main"):
        baselines.load(tmp_path, "main")
    with pytest.raises(AdvisorError, match="--perf-save"):
        baselines.newest(tmp_path)


def test_a_broken_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "main.json").write_text("{")
    with pytest.raises(AdvisorError, match="cut off, or no JSON"):
        baselines.load(tmp_path, "main")


@pytest.mark.parametrize("name", ["../main", "", "a b", ".hidden", "a/b"])
def test_a_name_is_a_plain_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(AdvisorError, match="baseline name"):
        baselines.path_of(tmp_path, name)


def test_a_machine_is_known_without_its_name_in_the_file(tmp_path: Path) -> None:
    path = baselines.save(tmp_path, "main", MACHINE, {"a": [ENTRY]}, update=False)
    import platform

    assert platform.node() not in path.read_text()
    assert H200.gpu_uuid not in path.read_text()


@pytest.mark.parametrize("field", ["device", "host", "gpu_uuid", "cpu_name", "cpu_count"])
def test_times_are_of_one_machine(field: str) -> None:
    other = replace(MACHINE, **{field: 3 if field == "cpu_count" else "other"})
    assert not MACHINE.same(other)
    assert MACHINE.same(replace(MACHINE, torch="2.99", driver="600"))


def test_how_far_a_value_is_past_its_baseline() -> None:
    kernels, busy = BY_KEY["kernels"], BY_KEY["busy"]
    assert compared(kernels, 105, 100, 0.05) == pytest.approx(0)
    assert compared(kernels, 106, 100, 0.05) == pytest.approx(1)
    assert compared(kernels, 103, 100, 2, absolute=True) == pytest.approx(1)
    assert compared(kernels, 90, 100, 0) < 0
    assert compared(busy, 0.8, 0.9, 0.0) == pytest.approx(0.1)
    assert compared(busy, 0.95, 0.9, 0.0) < 0


def test_entries_keep_the_longest_rows_only() -> None:
    rows = tuple(replace(PROFILE.kernels[0], name=f"k{i}", time_us=float(i)) for i in range(600))
    entry: BaselineEntry = Measured(replace(PROFILE, kernels=rows)).entry
    assert len(entry.rows) == baselines.MAX_ROWS
    assert entry.rows[0].what.startswith("k599")
