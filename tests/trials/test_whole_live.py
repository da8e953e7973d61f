"""In the running loop everything that fits is put on as one, before anything is tried by itself."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from searched_loop import (
    CHANGES,
    Graphs,
    Half,
    HalfInLayout,
    Layout,
    Raises,
    Slower,
    Waits,
    Warms,
    Wrong,
    candidates,
    find,
    train,
)

from advisor.core import storage
from advisor.core.findings import Interval
from advisor.core.verdict import Check
from advisor.loop.session import Session
from advisor.trials import records
from advisor.trials.live import blocks, driver
from advisor.trials.live.blocks import TimedBlocks
from advisor.trials.live.driver import SearchDriver
from advisor.trials.live.limit import Limit, OutOfTime
from advisor.trials.statistics import Decision

SEARCH = Session(mode="search", run_dir="", script="train.py", warmup=3, max_pairs=12)


def search(tmp_path, *names, limit_s=SEARCH.trial_timeout_s, **options):
    promised = tuple(replace(c, predicted=Interval(low=0.0, high=0.5)) for c in candidates(*names))
    orders = replace(SEARCH, run_dir=str(tmp_path), candidates=promised, whole_first=True, trial_timeout_s=limit_s)
    _, reason = train(orders, SearchDriver, find, **options)
    record = storage.load(tmp_path / records.SEARCH_FILE, records.SearchRecord)
    return {v.transform: v for v in records.verdicts(tmp_path)}, record, reason


def kernels(monkeypatch, of_the_wait):
    """The kernels' own time in the running loop, planted: this share of the net's wait, or the same always."""

    def kernel_times(loop, steps, note, check=None):
        for _ in range(steps + 1):
            yield
        wait_s = loop.training.roots[0].module.wait_s if of_the_wait else 0.01
        return (1e6 * (of_the_wait or 1.0) * wait_s,) * steps

    monkeypatch.setattr(blocks, "kernel_times", kernel_times)
    monkeypatch.setattr(driver, "kernel_times", kernel_times)


def planted(monkeypatch, **changes):
    for name, change in changes.items():
        made = type(change.__name__, (change,), {"id": name})
        monkeypatch.setitem(CHANGES, name, made)


def test_what_fits_is_kept_as_one_and_the_process_ends_for_its_proof(tmp_path, monkeypatch):
    planted(monkeypatch, channels_last=Layout, amp_bf16=HalfInLayout)  # of which each alone would lose
    verdicts, record, reason = search(tmp_path, "faster", "channels_last", "amp_bf16")
    assert reason == "search done"
    assert record.whole_kept
    assert {name: v.status for name, v in verdicts.items()} == {"channels_last": "kept", "amp_bf16": "kept"}
    assert verdicts["amp_bf16"].together == ("channels_last",)
    assert not record.complete  # what is no part of it comes later


def test_one_that_cannot_be_switched_on_costs_the_others_nothing(tmp_path, monkeypatch):
    planted(monkeypatch, channels_last=Waits, fused_optimizer=Raises, amp_bf16=Half, cuda_graphs=Graphs)
    verdicts, record, _ = search(tmp_path, "channels_last", "fused_optimizer", "amp_bf16", "cuda_graphs")
    assert record.whole_kept
    assert verdicts["fused_optimizer"].status == "failed"
    assert "no such kernel" in verdicts["fused_optimizer"].reason
    assert all(verdicts[name].status == "kept" for name in ("channels_last", "amp_bf16", "cuda_graphs"))


@pytest.mark.parametrize("wrong", ["amp_bf16", "cuda_graphs"])
def test_of_what_is_wrong_as_one_a_class_is_left_out(tmp_path, monkeypatch, wrong):
    planted(monkeypatch, channels_last=Waits, amp_bf16=Half, cuda_graphs=Graphs)
    planted(monkeypatch, **{wrong: Wrong})
    verdicts, record, _ = search(tmp_path, "channels_last", "amp_bf16", "cuda_graphs")
    assert record.whole_kept
    kept = {name for name, v in verdicts.items() if v.status == "kept"}
    assert kept == {"channels_last", "amp_bf16", "cuda_graphs"} - {wrong}
    assert "changes the training" in verdicts["channels_last + amp_bf16 + cuda_graphs"].reason
    assert wrong not in verdicts  # its own turn comes


def test_a_whole_that_is_slower_is_not_kept(tmp_path, monkeypatch):
    planted(monkeypatch, channels_last=Slower, amp_bf16=Slower)
    verdicts, record, _ = search(tmp_path, "channels_last", "amp_bf16")
    assert not record.whole_kept
    assert {v.status for v in verdicts.values()} == {"reverted"}


@pytest.mark.parametrize(("point", "kept"), [(0.05, True), (0.01, False)])
def test_what_noise_hides_is_left_to_fresh_processes_where_it_looks_faster(tmp_path, monkeypatch, point, kept):
    def run(self, switch, current, *, patient=True, hasty=False):
        yield
        assert hasty == (switch.transform.id == "channels_last + amp_bf16")
        return Decision("inconclusive", Interval(low=-0.1, high=0.2), point, "noise hides it")

    planted(monkeypatch, channels_last=Waits, amp_bf16=Half)
    monkeypatch.setattr(TimedBlocks, "run", run)
    verdicts, record, _ = search(tmp_path, "channels_last", "amp_bf16")
    assert record.whole_kept is kept
    if kept:
        assert "fresh runs decide" in verdicts["amp_bf16"].reason


@pytest.mark.parametrize(
    ("change", "limit_s", "pairs"),
    [(HalfInLayout, 5.0, 0), (HalfInLayout, 9.5, 0), (HalfInLayout, 14.0, 1), (Slower, 22.0, 0), (Slower, 32.0, 1)],
)
def test_a_whole_whose_trial_ends_before_its_pairs_is_left_to_fresh_processes_unless_it_was_seen_slower(
    tmp_path, monkeypatch, change, limit_s, pairs
):
    """An evaluation of 18 s took a RepLKNet's trial its time, on an H200: what was right and five times as fast was given up."""
    planted(monkeypatch, channels_last=Layout, amp_bf16=change)
    verdicts, record, _ = search(tmp_path, "channels_last", "amp_bf16", wait_s=2.0, limit_s=limit_s)
    kept = change is HalfInLayout
    assert record.whole_kept is kept
    first = verdicts["amp_bf16" if kept else "channels_last + amp_bf16"]
    assert first.reason.startswith(f"the {limit_s:.0f} s of a trial are over: fewer than two pairs")
    assert ("fresh runs decide" in first.reason) is kept
    assert min(len(first.blocks.off_us), len(first.blocks.on_us)) == pairs


def test_pairs_that_end_in_haste_and_look_no_faster_leave_it_open(tmp_path, monkeypatch):
    """There is nothing to put it off for: an unknown status once ended the search."""

    def run(self, switch, current, *, patient=True, hasty=False):
        yield
        return Decision("more" if hasty else "inconclusive", Interval(low=-0.1, high=0.2), 0.005, "6 pairs so far")

    planted(monkeypatch, channels_last=Waits, amp_bf16=Half)
    monkeypatch.setattr(TimedBlocks, "run", run)
    verdicts, _, reason = search(tmp_path, "channels_last", "amp_bf16")
    assert reason == "search done"
    assert verdicts["channels_last + amp_bf16"].status == "inconclusive"


def one_by_one(tmp_path, *names):
    """As `search`, with nothing tried as one first."""
    promised = tuple(replace(c, predicted=Interval(low=0.0, high=0.5)) for c in candidates(*names))
    orders = Session(
        mode="search", run_dir=str(tmp_path), script="train.py", warmup=3, candidates=promised, max_pairs=12
    )
    train(orders, SearchDriver, find)
    return {v.transform: v for v in records.verdicts(tmp_path)}


def test_a_kernel_that_needs_nhwc_is_tried_with_it_though_nobody_recommends_that(tmp_path, monkeypatch):
    planted(monkeypatch, channels_last=Layout, fused_bn_act=HalfInLayout)  # of which each alone would lose
    verdicts = one_by_one(tmp_path, "fused_bn_act")
    assert {name: v.status for name, v in verdicts.items()} == {"channels_last": "kept", "fused_bn_act": "kept"}
    assert verdicts["fused_bn_act"].together == ("channels_last",)


def test_a_kernel_that_does_not_gain_with_nhwc_is_not_tried_without(tmp_path, monkeypatch):
    planted(monkeypatch, channels_last=Layout, fused_bn_act=Slower)
    verdicts = one_by_one(tmp_path, "fused_bn_act")
    assert [(name, v.status) for name, v in verdicts.items()] == [("fused_bn_act", "reverted")]
    assert verdicts["fused_bn_act"].reason.startswith("with channels_last, which it needs")


def test_what_an_earlier_search_has_refused_is_no_part_of_the_whole_and_has_its_own_trial(tmp_path, monkeypatch):
    planted(monkeypatch, channels_last=Layout, amp_bf16=HalfInLayout, set_to_none=Wrong)
    asked = ("channels_last", "amp_bf16", "set_to_none")
    promised = tuple(replace(c, predicted=Interval(low=0.0, high=0.5)) for c in candidates(*asked))
    orders = replace(SEARCH, run_dir=str(tmp_path), candidates=promised, whole_first=True, later=("set_to_none",))
    train(orders, SearchDriver, find)
    verdicts = {v.transform: v.status for v in records.verdicts(tmp_path)}
    assert verdicts == {
        "channels_last": "kept",
        "amp_bf16": "kept",
    }  # at once; the other's turn comes in the next process


class Slightly(Waits):
    factor = 0.95


def test_the_kernels_time_decides_where_the_hosts_noise_hides_the_step(tmp_path, monkeypatch):
    kernels(monkeypatch, of_the_wait=0.5)
    planted(monkeypatch, quicker=Slightly)
    orders = replace(SEARCH, run_dir=str(tmp_path), candidates=candidates("quicker"), kernel_steps=6)
    train(orders, SearchDriver, find, noise=0.45)
    (verdict,) = records.verdicts(tmp_path)
    assert verdict.status == "kept", verdict.reason
    assert verdict.gain_of == "device"
    assert "waits for the host's launches" in verdict.reason
    assert 0.049 < verdict.gain.low <= verdict.gain.high < 0.051
    assert len(verdict.blocks.device_on_us) == 3  # pairs, which is all that it takes


def test_what_saves_none_of_the_kernels_time_is_not_refused_for_it(tmp_path, monkeypatch):
    kernels(monkeypatch, of_the_wait=0.0)
    planted(monkeypatch, quicker=Slightly)
    orders = replace(SEARCH, run_dir=str(tmp_path), candidates=candidates("quicker"), kernel_steps=6)
    train(orders, SearchDriver, find, noise=0.45)
    (verdict,) = records.verdicts(tmp_path)
    assert verdict.status == "inconclusive", verdict.reason
    assert verdict.gain_of == "step"


@pytest.mark.parametrize("asked", [("channels_last", "cuda_graphs"), ("cuda_graphs",)])
def test_what_is_captured_at_a_later_call_is_waited_for(tmp_path, monkeypatch, asked):
    """Three eager steps before a capture agree: a UNet's graphs were taken off there as without effect, before there was one."""
    planted(monkeypatch, channels_last=Layout, cuda_graphs=Warms)
    verdicts, *_ = search(tmp_path, *asked)
    assert {name: v.status for name, v in verdicts.items()} == dict.fromkeys(asked, "kept")


class Idle(Waits):
    """Finds nothing to do, and is switched all the same: each time is noted."""

    noted: ClassVar[Path]

    def apply(self, training, parameters):
        with self.noted.open("a") as file:
            file.write("on\n")
        return super().apply(training, parameters)

    def effect(self, training, before, after):
        return Check(passed=False, detail="nothing was found")


def test_what_has_no_effect_is_off_before_anything_is_timed(tmp_path, monkeypatch):
    Idle.noted = tmp_path / "noted"
    planted(monkeypatch, channels_last=Layout, amp_bf16=HalfInLayout, set_to_none=Idle)
    verdicts, record, _ = search(tmp_path, "channels_last", "amp_bf16", "set_to_none")
    assert record.whole_kept
    assert {name: v.status for name, v in verdicts.items()} == {
        "channels_last": "kept",
        "amp_bf16": "kept",
        "set_to_none": "reverted",
    }
    assert len(Idle.noted.read_text().splitlines()) == 1  # for the check of its numbers, and in none of the pairs


def test_time_that_ends_when_what_has_no_effect_was_dropped_leaves_each_its_verdict(tmp_path, monkeypatch):
    """Advisor switched itself off there, and the report spoke of the time."""
    dropped = []

    class Dropped(Idle):
        def release(self, training):
            dropped.append(self)

    def check(self):
        if dropped:
            raise OutOfTime("the 13 s of a trial are over")

    Idle.noted = tmp_path / "noted"
    monkeypatch.setattr(Limit, "check", check)
    planted(monkeypatch, channels_last=Layout, amp_bf16=HalfInLayout, set_to_none=Dropped)
    verdicts, record, reason = search(tmp_path, "channels_last", "amp_bf16", "set_to_none")
    assert reason == "search done"
    assert record.whole_kept
    assert {name: v.status for name, v in verdicts.items()} == {
        "channels_last": "kept",
        "amp_bf16": "kept",
        "set_to_none": "reverted",
    }


def test_of_slow_steps_one_makes_a_block_of_what_fresh_processes_judge_next(tmp_path, monkeypatch):
    planted(monkeypatch, channels_last=Layout, amp_bf16=HalfInLayout)
    verdicts, record, _ = search(tmp_path, "channels_last", "amp_bf16", wait_s=2.0)
    assert record.whole_kept
    blocks_of = verdicts["amp_bf16"].blocks
    assert (blocks_of.steps_per_block, len(blocks_of.on_us)) == (1, 3)
