"""Every registered transform is there, under its own id, and names only others that are."""

from __future__ import annotations

import pytest
from loops import make_loop

from advisor.core.errors import AdvisorError
from advisor.transforms import registry


@pytest.mark.parametrize("identifier", registry.TRANSFORMS)
def test_each_id_leads_to_its_transform(identifier: str) -> None:
    transform = registry.get(identifier)
    assert transform.id == identifier
    assert transform.title
    assert {*transform.after, *transform.conflicts} <= registry.TRANSFORMS.keys() - {identifier}
    assert {*transform.waits_for} <= {*transform.after}
    assert transform.__doc__


@pytest.mark.parametrize("identifier", registry.TRANSFORMS)
def test_each_says_on_a_cpu_whether_it_applies(identifier: str) -> None:
    match = registry.get(identifier).match(make_loop(steps=1).training, {})
    assert match.sites if match.applies else match.reason


def test_an_unknown_id_is_told() -> None:
    with pytest.raises(AdvisorError, match="no transform 'amp'"):
        registry.get("amp")
