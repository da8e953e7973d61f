"""cuDNN's own search in the first steps of a fresh run, which are those of the plain script."""

import pytest
import torch

from advisor.trials.first_steps import Untuned


@pytest.fixture(autouse=True)
def flag():
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


def flags(kept, *, script_sets=True):
    """The flag in a forward of the first step, of one behind which changes still wait that leave convolutions alone, and of the third."""
    untuned = Untuned(set(kept))
    torch.backends.cudnn.benchmark = script_sets  # the script, behind our start
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    seen = []
    net[0].register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.benchmark))
    for waiting in (set(kept), {"fused_optimizer"}, set()):
        net(torch.zeros(1, 3, 8, 8))
        untuned.look(waiting)
    return seen


@pytest.mark.parametrize("kept", [["amp_bf16"], ["channels_last", "fused_optimizer"]])
def test_convolutions_that_the_plan_makes_others_are_not_tuned_before(kept):
    """The second step is the first behind the change; it waits for no optimizer."""
    assert flags(kept) == [False, False, True]


def test_those_that_stay_are_tuned_at_once_as_in_the_script():
    assert flags(["fused_optimizer", "cuda_graphs"]) == [True, True, True]


def test_a_script_that_does_not_ask_for_it_never_gets_it():
    assert flags(["amp_bf16"], script_sets=False) == [False, False, False]


def test_nothing_is_left_behind():
    untuned = Untuned({"amp_bf16"})
    untuned.look(set())
    untuned.look(set())
    assert not torch.nn.modules.module._global_forward_pre_hooks
