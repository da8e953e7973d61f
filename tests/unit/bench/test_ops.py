"""The op benchmark's bookkeeping without a GPU: which cases, whose rows, what happens when one fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from advisor.bench import goals, op_rows, ops, timing, units
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.ops import catalog, nvrtc
from advisor.ops.family import Case, Family, Work, kernel_sha
from advisor.profiling.machine import counters as hardware
from advisor.profiling.machine.cupti import CountersUnavailable

BN = catalog.get("batchnorm_act")


def rows_of(case: Case, ms: float = 1.0) -> list[op_rows.OpRow]:
    return [
        op_rows.OpRow(
            name=case.name, pass_=kind, shape=case.shape, dtype=case.dtype, layout=case.layout, advisor_ms=ms, eager_ms=2.0,
            compile_ms=None, limit_ms=0.5, spread=0.0, eager_spread=0.0, n=9, advisor_host_us=1.0, eager_host_us=1.0,
            error=0.0, baseline_error=0.0, kernel_sha=kernel_sha(work), torch="2", date="2026-01-02",
        )
        for kind, work in case.passes.items()
    ]  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "")
    monkeypatch.setattr(nvrtc, "arch", lambda device: 90)
    monkeypatch.setattr(nvrtc, "warm", lambda variants: None)
    monkeypatch.setattr(timing, "copy_gbps", lambda: 4000.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.fixture
def bench(
    monkeypatch: pytest.MonkeyPatch, machine: None, tmp_path: Path
) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    def run(
        measure: Callable[..., Any],
        pattern: str = "batchnorm_act bn+hardswish float32",
        *,
        changed: bool = False,
        short_only: bool = False,
        part: tuple[int, int] = (1, 1),
        counters: bool = False,
        host_only: bool = False,
    ) -> tuple[int, list[dict[str, Any]]]:
        monkeypatch.setattr(ops, "measure", measure)
        choice = op_rows.RowChoice(pattern=pattern, changed=changed, short_only=short_only, part=part)
        code = ops.run(
            choice, out=tmp_path / "ops.json", baselines=(), counters=counters, host_only=host_only, say=lambda _: None
        )
        return code, json.loads((tmp_path / "ops.json").read_text())["rows"]

    return run


def test_a_pattern_is_words_of_family_name_dtype_and_shape() -> None:
    assert {case.dtype for _, case in op_rows.chosen("batchnorm_act bn+hardswish float32")} == {"float32"}
    assert len(op_rows.chosen("batchnorm_act")) == len(BN.benchmark)
    assert [case.shape for _, case in op_rows.chosen("batchnorm_act bn+add+relu bfloat16 256x72x56x56")] == [
        (256, 72, 56, 56)
    ]
    with pytest.raises(AdvisorError, match="nothing is named like 'bn\\+tanh'"):
        op_rows.chosen("bn+tanh")


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(AdvisorError) as caught:
        ops.run(op_rows.RowChoice(), out=None, baselines=(), counters=True, say=print)
    assert caught.value.exit_code == ExitCode.GPU_REQUIRED


def test_rows_are_written_and_others_of_the_file_stay(bench) -> None:
    code, rows = bench(lambda _, case, *__, **___: rows_of(case))
    assert code == ExitCode.OK
    assert len(rows) == 2 * len(op_rows.chosen("batchnorm_act bn+hardswish float32"))
    code, more = bench(
        lambda _, case, *__, **___: rows_of(case, ms=3.0), "batchnorm_act bn+hardswish float16 256x64x112x112"
    )
    assert [row for row in more if row["dtype"] == "float32"] == rows
    assert {row["advisor_ms"] for row in more if row["dtype"] == "float16"} == {3.0}
    _, again = bench(
        lambda _, case, *__, **___: rows_of(case, ms=4.0), "batchnorm_act bn+hardswish float16 256x64x112x112"
    )
    assert len(again) == len(more)
    assert {row["advisor_ms"] for row in again if row["dtype"] == "float16"} == {4.0}


def on_file(cases: Sequence[tuple[Family, Case]]) -> list[dict[str, Any]]:
    """Rows of today's kernels, with no compiled code beside them."""
    return [
        {**dict(zip(("name", "pass", "shape", "dtype"), row, strict=True)), "compile_ms": None}
        | {"kernel_sha": kernel_sha(work)}
        for _, case in cases
        for row, work in zip(op_rows.keys(case), case.passes.values(), strict=True)
    ]


def test_a_case_and_the_same_apart_are_measured_in_one_run() -> None:
    cases = op_rows.chosen("pointwise apart")
    partners = [(kind, case) for kind, case in op_rows.chosen("pointwise") if not case.name.endswith(op_rows.APART)]
    rows = on_file([*cases, *partners])
    assert op_rows.outdated([*cases, *partners], rows) == []
    changed = cases[0][1].name.removesuffix(op_rows.APART)
    without = [row for row in rows if (row["name"], row["shape"]) != (changed, cases[0][1].shape)]
    assert {case.name for _, case in op_rows.outdated([*cases, *partners], without)} == {
        changed,
        changed + op_rows.APART,
    }


def test_a_row_without_a_baseline_that_is_asked_for_is_measured_again() -> None:
    cases = op_rows.chosen("grouped")
    bf16 = {case.name for _, case in cases if case.dtype == "bfloat16"}
    rows = on_file(cases)
    assert op_rows.outdated(cases, rows, ("eager",)) == []
    assert {case.name for _, case in op_rows.outdated(cases, rows, ("eager", "compile"))} == bf16
    for row in rows:  # in the dtype that is compiled, of what is made apart not again
        row["compile_ms"] = 1.0 if row["dtype"] == "bfloat16" and not row["name"].endswith(op_rows.APART) else None
    assert op_rows.outdated(cases, rows, ("eager", "compile")) == []


def test_what_has_changed_is_what_has_no_row_of_its_kernels(bench, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    measured: list[str] = []

    def measure(_: Any, case: Case, *__: Any, **___: Any) -> list[op_rows.OpRow]:
        measured.append(case.label)
        return rows_of(case)

    pattern = "batchnorm_act bn+hardswish float32"
    cases = [case.label for _, case in op_rows.chosen(pattern)]
    bench(measure, f"{pattern} {cases[0].split()[-1]}")
    measured.clear()
    bench(measure, pattern, changed=True)
    assert measured == cases[1:]
    measured.clear()
    bench(measure, pattern, changed=True)
    assert not measured
    assert "is of the kernels as they are" in capsys.readouterr().out
    changed = op_rows.chosen(pattern)[1][1].passes["backward"].kernels  # one pass's alone
    sha = ops.family.kernel_sha
    monkeypatch.setattr(op_rows.family, "kernel_sha", lambda work: "new" if work.kernels == changed else sha(work))
    bench(measure, pattern, changed=True)
    assert measured == [case.label for _, case in op_rows.chosen(pattern) if case.passes["backward"].kernels == changed]


def test_parts_make_the_whole_whatever_each_finds_on_file(bench) -> None:
    """Here the second begins when the first has written its rows, and both see a file that lacks others."""
    pattern = "pointwise"
    measured: dict[int, list[Case]] = {1: [], 2: []}
    for number in measured:

        def measure(_: Any, case: Case, *__: Any, number: int = number, **___: Any) -> list[op_rows.OpRow]:
            measured[number].append(case)
            return rows_of(case)

        _, rows = bench(measure, pattern, changed=True, part=(number, 2))
    both = [case for cases in measured.values() for case in cases]
    assert {case.label for case in both} == {case.label for _, case in op_rows.chosen(pattern)}
    assert len(both) == len(op_rows.chosen(pattern))
    assert len(rows) == sum(len(case.passes) for case in both)
    assert abs(len(measured[1]) - len(measured[2])) <= 2
    for cases in measured.values():  # one case made together and apart is compared with itself
        labels = {case.label for case in cases}
        assert {label.replace(op_rows.APART, "") for label in labels} <= labels


def test_rows_that_another_process_writes_meanwhile_stay(bench, tmp_path: Path) -> None:
    pattern = "batchnorm_act bn+hardswish float32"
    (_, other), *_ = op_rows.chosen("batchnorm_act bn+hardswish float16")

    def measure(_: Any, case: Case, *__: Any, **___: Any) -> list[op_rows.OpRow]:
        ops.OpsFile(tmp_path / "ops.json").keep(rows_of(other, ms=7.0), ops.Ceilings(copy_gbps=1.0))
        return rows_of(case)

    _, rows = bench(measure, pattern)
    assert {row["dtype"] for row in rows} == {other.dtype, "float32"}


def test_short_takes_what_the_file_shows_short_of_its_goal(bench, capsys) -> None:
    """Of two large cases one that misses 0.85 of its limit; a small one has no goal."""
    measured: list[str] = []
    reached: dict[str, float] = {}

    def measure(_: Any, case: Case, *__: Any, **___: Any) -> list[op_rows.OpRow]:
        measured.append(case.label)
        return [
            replace(row, limit_ms=row.advisor_ms * reached.get(f"{case.label} {row.pass_}", 0.86))
            for row in rows_of(case)
        ]

    pattern = "batchnorm_act bn+add+relu bfloat16"
    cases = [case for _, case in op_rows.chosen(pattern) if not case.wins()]
    large, small = [case for case in cases if goals.large(case)], [case for case in cases if not goals.large(case)]
    assert len(large) > 2
    assert small
    reached = {f"{large[1].label} backward": 0.84, f"{small[0].label} forward": 0.1}
    bench(measure, pattern)
    measured.clear()
    reached.clear()
    bench(measure, pattern, short_only=True)
    assert measured == [large[1].label]
    measured.clear()
    code, _ = bench(measure, pattern, short_only=True)
    assert code == ExitCode.OK
    assert not measured
    assert "is short of a goal" in capsys.readouterr().out


def test_a_case_that_fails_is_told_and_the_rest_goes_on(bench, capsys) -> None:
    def measure(_: Any, case: Case, *__: Any, **___: Any) -> list[op_rows.OpRow]:
        if case.shape == (256, 256, 56, 56):
            raise RuntimeError("out of memory\nwith a long tale")
        return rows_of(case)

    code, rows = bench(measure)
    assert code == ExitCode.FINDINGS
    assert {tuple(row["shape"]) for row in rows} == {(256, 64, 112, 112), (256, 512, 28, 28)}
    printed = capsys.readouterr()
    assert "limit/ours 0.50  eager/ours  2.00" in printed.out
    assert "1 of 3 cases failed" in printed.err
    assert "long tale" not in printed.err


def test_rows_of_cases_that_are_gone_are_dropped() -> None:
    case = BN.benchmark[0]
    old = [storage.to_plain(row) for row in (*rows_of(case), *rows_of(replace(case, name="gone")))]
    assert op_rows.merged(old, [], op_rows.keys(case)) == old[:2]


def test_kernels_that_did_not_run_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BN.benchmark[0]
    monkeypatch.setattr(ops, "rows_of", lambda case, *_, **__: rows_of(case))
    with pytest.raises(AdvisorError, match="did not run"):
        ops.measure(BN, case, ops.Ceilings(copy_gbps=1.0), compiled=False)


def test_the_limit_is_the_longer_of_bytes_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(timing, "matrix_tflops", lambda dtype: asked.append(dtype) or 100.0)
    ceilings = ops.Ceilings(copy_gbps=1000.0)
    assert ceilings.limit_ms(Work(kernels=(), nbytes=10**9), "bfloat16") == pytest.approx(1.0)
    assert not asked
    vector = Work(kernels=(), nbytes=10**9, flops=10**12)
    assert ceilings.limit_ms(vector, "bfloat16") == pytest.approx(10.0)
    assert ceilings.limit_ms(replace(vector, unit="matrix", flops=10**9), "bfloat16") == pytest.approx(1.0)
    assert asked == [torch.float32, torch.bfloat16]


def test_memory_is_what_a_pass_takes_beyond_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated, peak = [100], [100]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, allocated[0]))

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            allocated[0], peak[0] = 180, 300  # output and saved stay; 120 more in between
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            peak[0] = 270
            return dy * 2

    monkeypatch.setattr(ops.verify, "seeded", lambda device, seed: torch.Generator())
    work = Work(kernels=(), nbytes=1)
    case = replace(
        BN.benchmark[0],
        passes={"forward": work, "backward": work},
        inputs=lambda generator, n: (torch.ones(10, requires_grad=True),),
    )
    assert ops.peaks(case, Doubles.apply) == {"forward": 200, "backward": 270 - 100 - 40}


class Counting:
    """Counters that have counted `shares`, and say when they are on."""

    def __init__(self, shares: Callable[[], dict[str, float]]) -> None:
        self.made = shares
        self.on = False

    def __enter__(self) -> Counting:
        self.on = True
        return self

    def __exit__(self, *_: object) -> None:
        self.on = False

    def shares(self, run: Any, sets: Any) -> dict[str, float]:
        assert self.on
        return self.made()


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    found = Counting(lambda: {"memory": 0.7, "sms": 0.9})
    monkeypatch.setattr(units, "UnitCounters", lambda: found)
    monkeypatch.setattr(hardware, "preflight", lambda: (True, ""))
    monkeypatch.setattr(ops, "contests", lambda case, runs: [(way, runs, [0]) for way in case.passes])
    return found


def test_units_are_counted_when_all_cases_have_been_timed(bench, counting: Counting, capsys) -> None:
    timed = []

    def measure(_: Any, case: Case, *__: Any, **___: Any) -> list[op_rows.OpRow]:
        assert not counting.on
        timed.append(case.label)
        return rows_of(case)

    code, rows = bench(measure, counters=True)
    assert code == ExitCode.OK
    assert len(rows) == 2 * len(timed) > 2
    assert all(row["units"] == {"memory": 0.7, "sms": 0.9} for row in rows)
    assert [storage.from_plain(op_rows.OpRow, row).units for row in rows] == [{"memory": 0.7, "sms": 0.9}] * len(rows)
    printed = capsys.readouterr().out
    assert "bn+hardswish             backward memory 70 %; SMs 90 %" in printed
    assert printed.index("memory 70 %") > printed.rindex("limit/ours")
    assert not counting.on


def test_without_the_flag_nothing_is_counted_and_a_row_is_replaced_whole(bench, counting: Counting) -> None:
    bench(lambda _, case, *__, **___: rows_of(case), counters=True)
    _, rows = bench(lambda _, case, *__, **___: rows_of(case))
    assert {row["units"] for row in rows} == {None}


def test_rows_that_were_never_counted_are_counted_and_not_timed_again(bench, counting: Counting, capsys) -> None:
    _, before = bench(lambda _, case, *__, **___: rows_of(case, ms=7.0))
    code, rows = bench(lambda *_, **__: pytest.fail("measured"), changed=True, counters=True)
    assert code == ExitCode.OK
    assert [{**row, "units": None} for row in rows] == before
    assert all(row["units"] == {"memory": 0.7, "sms": 0.9} for row in rows)
    capsys.readouterr()
    assert bench(lambda *_, **__: pytest.fail("measured"), changed=True, counters=True) == (ExitCode.OK, rows)
    assert "every row" in capsys.readouterr().out


def test_what_has_changed_is_measured_and_counted_beside_what_is_counted_alone(
    bench, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = bench(lambda _, case, *__, **___: rows_of(case, ms=7.0))
    changed = tuple(before[0]["shape"])
    monkeypatch.setattr(op_rows, "outdated", lambda cases, *_: [one for one in cases if one[1].shape == changed])
    measured = []

    def measure(_: Any, case: Case, *__: Any, **___: Any) -> list[op_rows.OpRow]:
        measured.append(case.shape)
        return rows_of(case, ms=1.0)

    _, rows = bench(measure, changed=True, counters=True)
    assert measured == [changed]
    assert {(tuple(row["shape"]) == changed, row["advisor_ms"]) for row in rows} == {(True, 1.0), (False, 7.0)}
    assert all(row["units"] for row in rows)


def test_a_pass_that_cannot_be_counted_is_told_and_keeps_its_times(bench, counting: Counting, capsys) -> None:
    answers = iter([units.NotCounted("3 samples lie inside"), RuntimeError("out of memory\nwith a long tale")])

    def shares() -> dict[str, float]:
        error = next(answers, None)
        if error:
            raise error
        return {"memory": 0.5}

    counting.made = shares
    code, rows = bench(lambda _, case, *__, **___: rows_of(case), counters=True)
    assert code == ExitCode.OK
    assert [row["units"] for row in rows[:3]] == [None, None, {"memory": 0.5}]
    assert {row["advisor_ms"] for row in rows} == {1.0}
    printed = capsys.readouterr().out
    assert "forward: not counted: 3 samples lie inside" in printed
    assert "RuntimeError: out of memory\n" in printed


@pytest.mark.parametrize("where", ["opened", "shares"])
def test_counters_that_another_takes_meanwhile_lose_nothing(
    bench, counting: Counting, where: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def taken(*_: Any) -> Any:
        raise CountersUnavailable("another profiler holds the performance counters")

    if where == "opened":
        monkeypatch.setattr(units, "UnitCounters", taken)
    else:
        counting.made = taken
    code, rows = bench(lambda _, case, *__, **___: rows_of(case), counters=True)
    assert code == ExitCode.OK
    assert len(rows) == 2 * len(op_rows.chosen("batchnorm_act bn+hardswish float32"))
    assert capsys.readouterr().out.count("not counted: another profiler holds") == 1


def test_without_counters_it_says_so_before_anything_is_measured(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "preflight", lambda: (False, "the driver lets only administrators read them"))
    with pytest.raises(AdvisorError, match=r"^no counters here: the driver lets only administrators") as caught:
        bench(lambda *_, **__: pytest.fail("measured"), counters=True)
    assert caught.value.exit_code == ExitCode.GPU_REQUIRED


def test_the_host_s_times_are_taken_again_and_all_else_of_a_row_stays(
    bench, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    _, before = bench(lambda _, case, *__, **___: rows_of(case, ms=7.0))
    asked: list[Case] = []

    def host_us(case: Case) -> dict[str, dict[str, float]]:
        asked.append(case)
        return {"forward": {"advisor": 30.0, "eager": 20.0}, "backward": {"advisor": 50.0, "eager": 20.0}}

    monkeypatch.setattr(ops, "host_us", host_us)
    code, rows = bench(lambda *_, **__: pytest.fail("measured"), "batchnorm_act float32", host_only=True)
    assert code == ExitCode.OK
    assert len(asked) == len(before) // 2  # a case that has no rows is none of it
    assert {(row["pass"], row["advisor_host_us"], row["eager_host_us"]) for row in rows} == {
        ("forward", 30.0, 20.0),
        ("backward", 50.0, 20.0),
    }
    times = {"advisor_host_us", "eager_host_us", "host_date"}
    assert [{k: v for k, v in row.items() if k not in times} for row in rows] == [
        {k: v for k, v in row.items() if k not in times} for row in before
    ]
    assert all(row["host_date"] > row["date"] for row in rows)
    assert "host    30 us  eager    20 us    +10" in capsys.readouterr().out


def test_rows_of_other_kernels_have_no_host_s_times_of_these(bench, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    bench(lambda _, case, *__, **___: [replace(row, kernel_sha="0" * 64) for row in rows_of(case)])
    monkeypatch.setattr(ops, "host_again", lambda *_: pytest.fail("taken"))
    assert bench(lambda *_, **__: pytest.fail("measured"), host_only=True)[0] == ExitCode.OK
    assert "is of the kernels as they are" in capsys.readouterr().out
