"""Memory that a trial leaves in cycles, on a device of planted size."""

import gc
import weakref

import pytest
import torch

from advisor.trials.live import release


class Held:
    """In a cycle with itself, as an error's frames are."""

    def __init__(self):
        self.itself = self


@pytest.mark.parametrize(("free", "gone"), [(20, True), (80, False)])
def test_garbage_is_collected_where_the_device_is_short_of_memory(monkeypatch, free, gone):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100))
    gc.disable()
    try:
        held = Held()
        seen = weakref.ref(held)
        del held
        release.give_back(torch.device("cuda", 0))
        assert (seen() is None) is gone
        assert len(calls) == 1 + gone  # what the collector has freed goes to the driver too
    finally:
        gc.enable()


def test_on_a_cpu_there_is_nothing_to_give_back(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("no device"))
    release.give_back(torch.device("cpu"))
