"""The ledger of predictions: appended to, read back past damage, summed up for one machine."""

from dataclasses import replace

import pytest

from advisor.core.environment import Environment
from advisor.core.findings import Interval
from advisor.core.profile import Spread, StepProfile
from advisor.core.verdict import Blocks, TrialLog, Verdict
from advisor.trials import ledger

PROFILE = StepProfile(
    script="train.py",
    argv=(),
    created="",
    environment=Environment(device="cuda", gpu_name="NVIDIA H200", sm_arch=90, torch="2.11.0"),
    step_kind="optimizer",
    step_us=Spread(median=1000.0, p10=990.0, p90=1010.0, n=20),
    wall_us=None,
)


def verdict(transform, predicted, gain, off_us=1000.0):
    return Verdict(
        transform=transform,
        status="kept",
        reason="",
        predicted=Interval(low=predicted[0], high=predicted[1]),
        gain=Interval(low=gain[0], high=gain[1]) if gain else None,
        blocks=Blocks(off_us=(off_us,) * 3),
    )


LOG = TrialLog(
    script="train.py",
    argv=(),
    verdicts=(
        verdict("tf32", (0.1, 0.3), (0.19, 0.21)),
        verdict("compile", (0.0, 0.1), (0.4, 0.5)),
        verdict("skipped", (0.0, 0.1), None),
    ),
)


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    monkeypatch.setenv(ledger.VARIABLE, str(tmp_path / "ledger.jsonl"))
    return tmp_path / "ledger.jsonl"


def test_what_was_measured_is_added_and_read_back(own_file):
    ledger.append(ledger.entries(LOG, PROFILE))
    first = own_file.read_text()
    ledger.append(ledger.entries(LOG, PROFILE))
    assert own_file.read_text().startswith(first)  # only ever added to
    found = ledger.read()
    assert [entry.transform for entry in found] == ["tf32", "compile"] * 2
    assert (found[0].predicted.high, found[0].measured.high) == (0.3, 0.21)
    assert [entry.held for entry in found[:2]] == [True, False]
    assert found[0].error == pytest.approx(0.0)
    assert found[1].error == pytest.approx(0.4)


def test_gains_are_told_as_shares_of_the_plain_step():
    # Half the step is gone by then: a fifth of what is left is a tenth of the plain one.
    log = replace(LOG, verdicts=(verdict("tf32", (0.1, 0.3), (0.2, 0.2), off_us=500.0),))
    (entry,) = ledger.entries(log, PROFILE)
    assert entry.measured.low == entry.measured.high == pytest.approx(0.1)
    assert ledger.entries(LOG, replace(PROFILE, step_us=None)) == ()


def test_damage_costs_its_own_line_only(own_file):
    ledger.append(ledger.entries(LOG, PROFILE))
    with own_file.open("a") as stream:
        stream.write('{"date": "20\n[1]\n{"date": 3}\n')
    ledger.append(ledger.entries(LOG, PROFILE))
    assert len(ledger.read()) == 4
    own_file.write_bytes(b"\xff\xfe")
    assert ledger.read() == ()


def test_a_ledger_that_cannot_be_written_is_no_reason_to_fail(monkeypatch, tmp_path):
    monkeypatch.setenv(ledger.VARIABLE, str(tmp_path / "nowhere" / "ledger.jsonl"))
    ledger.append(ledger.entries(LOG, PROFILE))
    assert ledger.read() == ()


def test_the_summary_is_of_this_machine(monkeypatch):
    here = ledger.entries(LOG, PROFILE)
    other = replace(here[1], machine="another")
    assert "1 of 2 measured gains" in ledger.summary((*here, other), here[0].machine)
    assert "1 of 3" in ledger.summary((*here, other))
    assert "20 % of the step" in ledger.summary(here)
    assert "no change" in ledger.summary(here, "a third")
    noisy = replace(here[0], status="inconclusive", measured=Interval(low=-0.5, high=0.5))
    assert "1 of 2" in ledger.summary((*here, noisy, noisy))
    assert ledger.summary((*here, noisy, noisy)).endswith("2 inconclusive trials not counted")
    assert ledger.summary((noisy,)) == (
        "no change with a prediction has been measured here yet (1 inconclusive trial not counted)"
    )
    ledger.append(here)
    monkeypatch.setattr(ledger.environment, "probe", lambda: PROFILE.environment)
    assert "1 of 2" in ledger.told_here()
