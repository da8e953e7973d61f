"""One switch over what `wins` says, and the counters."""

from __future__ import annotations

import contextlib

import pytest

from advisor.ops import dispatch


@pytest.fixture(autouse=True)
def _own_counters(monkeypatch):
    monkeypatch.setattr(dispatch, "engaged", {})
    monkeypatch.setattr(dispatch, "fell_back", {})


def test_a_call_is_refused_where_unsupported_or_not_winning() -> None:
    assert dispatch.refusal("", "") == ""
    assert dispatch.refusal("", "slower") == "slower"
    assert dispatch.refusal("dtype", "slower") == "dtype"


def test_everything_ignores_wins_but_not_support_and_ends_with_its_block() -> None:
    with dispatch.everything():
        with contextlib.suppress(ZeroDivisionError), dispatch.everything():
            assert dispatch.refusal("", dispatch.UNMEASURED) == ""
            assert dispatch.refusal("dtype", "") == "dtype"
            raise ZeroDivisionError
        assert dispatch.refusal("", dispatch.UNMEASURED) == ""
    assert dispatch.refusal("", dispatch.UNMEASURED) == dispatch.UNMEASURED


def test_counters_are_one_pair_a_family() -> None:
    ran, not_ran = dispatch.counters("pool")
    ran["max"] += 3
    not_ran["dtype float64"] += 2
    assert dispatch.counters("pool") == (ran, not_ran)
    assert dispatch.told("pool") == "the kernels ran 3 times; 2 calls ran PyTorch's own: dtype float64"
    assert dispatch.told("other") == "the kernels ran 0 times"
    dispatch.clear()
    assert not ran
    assert not not_ran
