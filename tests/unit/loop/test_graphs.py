import pytest
import torch

from advisor.loop import graphs, heap


class Graph:
    """Stands for torch.cuda.CUDAGraph, which a build without CUDA cannot make."""


class Proxy:
    @property
    def __class__(self):
        raise AssertionError("a proxy's code was run")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)


@pytest.mark.usefixtures("gpu")
def test_a_captured_graph_is_seen_while_it_lives_whoever_holds_it():
    assert not graphs.alive()
    proxy = Proxy()
    held = {"somewhere": [type("Kept", (Graph,), {})()]}  # what the script, Inductor or advisor may hold
    assert graphs.alive()
    held.clear()
    assert not graphs.alive()
    assert object.__repr__(proxy)


def test_objects_of_a_class_on_top_of_one_of_pytorchs_own_are_found():
    """As `torch.cuda.CUDAGraph` is one: Python on top of pybind11, which a build without CUDA has of other things."""
    kind = type("Made", (torch._C.FileCheck,), {})
    one = kind()
    assert [id(found) for found in heap.living(heap.classes(kind))] == [id(one)]
    one.check("x").run("x")


def test_without_cuda_nothing_is_looked_through(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(heap, "living", lambda kinds: pytest.fail("looked through all objects"))
    assert not graphs.alive()
