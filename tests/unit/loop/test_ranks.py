"""Which of a training's processes this one is."""

import pytest

from advisor.loop import ranks


def test_before_there_is_a_group_the_launcher_is_believed(monkeypatch) -> None:
    assert (ranks.group(), ranks.joined()) == ((0, 1), (0, 1))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (ranks.group(), ranks.joined()) == ((3, 8), (0, 1))
    monkeypatch.setenv("RANK", "third")
    assert ranks.group() == (0, 1)


@pytest.mark.usefixtures("process_group")
def test_a_group_is_believed_before_its_launcher(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ranks.group() == ranks.joined() == (0, 1)
