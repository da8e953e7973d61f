from __future__ import annotations

from dataclasses import replace

import pytest
import samples

from advisor.reporting import places


def test_places_are_by_what_is_said_of_them_most_first_and_in_their_order():
    groups = places.grouped(("a: rare", "b.1: often: so", "c (net.py:3): often: so"))
    assert [(g.text, g.paths) for g in groups] == [("often: so", ("b.1", "c (net.py:3)")), ("rare", ("a",))]
    assert places.grouped(()) == []


def test_texts_that_differ_in_numbers_are_one_and_each_place_keeps_its_own():
    (group,) = places.grouped(("a: 64 in, 3x3, {0} 0.5", "b: 8 in, 3x3, {0} 0.25", "c: 64 in, 3x3, {0} 0.5"))
    assert group.text == "8–64 in, 3x3, {0} 0.25–0.5"
    assert group.places == (("a", "64, 0.5"), ("b", "8, 0.25"), ("c", "64, 0.5"))
    assert places.grouped(("a: 3x3", "b: 3x3"))[0].places == (("a", ""), ("b", ""))


def test_paths_of_which_nothing_is_said():
    (group,) = places.grouped(("ResNet.conv1", "ResNet.conv2"))
    assert (group.text, group.paths) == ("", ("ResNet.conv1", "ResNet.conv2"))


def test_told_of_are_kept_changes_that_name_what_they_did_or_left_something():
    log = samples.many_places()
    assert [v.transform for v in places.told(log)] == ["fused_bn_act"]  # the sample's others name a model, and no more
    fused = places.told(log)[0]
    assert places.told(replace(log, verdicts=(replace(fused, status="reverted"),))) == ()
    assert places.told(replace(log, verdicts=(replace(fused, matched=("ResNet",)),)))
    assert not places.told(replace(log, verdicts=(replace(fused, matched=("ResNet",), unmatched=()),)))


@pytest.mark.parametrize(("matched", "unmatched", "text"), [(1, 0, "1 place"), (1250, 1, "1,250 places, 1 unchanged")])
def test_a_headline_counts(matched, unmatched, text):
    (verdict,) = places.told(samples.many_places(matched, unmatched))
    assert places.headline(verdict) == f"fused batch norm, add and ReLU: {text}"
