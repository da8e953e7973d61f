"""The choice in front of each convolution: what is decided, timed, kept, and taken back."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from loops import fingerprint, make_loop
from torch import nn
from torch.nn import functional as F

from advisor.core.environment import Environment
from advisor.transforms import conv_choice
from advisor.transforms.choosing import chooser as choosing
from advisor.transforms.choosing.chooser import Chooser
from advisor.transforms.choosing.clock import Clock
from advisor.transforms.choosing.decide import Timed, decide
from advisor.transforms.choosing.numbers import DATA, FORWARD, WEIGHT
from advisor.transforms.choosing.store import Store
from advisor.transforms.choosing.ways import USUAL

CPU = torch.device("cpu")
AS_IT_WAS = Timed(way=USUAL, times_us=(100.0, 101.0, 102.0), error=1e-3)


def other(times: tuple[float, ...] = (80.0, 81.0, 82.0), error: float = 1e-3, failed: str = "") -> Timed:
    return Timed(way="nhwc", times_us=times, error=error, failed=failed)


def test_the_fastest_way_that_is_right_is_taken() -> None:
    choice = decide(AS_IT_WAS, [other(), Timed(way="nchw", times_us=(70.0,), error=1e-3)], least_us=50.0)
    assert (choice.way, choice.time_us, choice.usual_us, choice.refused) == ("nchw", 70.0, 101.0, {})


@pytest.mark.parametrize(
    ("timed", "reason"),
    [
        (other(error=2.1e-3), "error 2.1e-03, where 2.0e-03 is allowed"),
        (other(error=math.nan), "error nan"),
        (other(failed="no memory"), "no memory"),
        (other(times=()), "the time for it was over"),
        (other(times=(40.0, 80.0)), "error: nhwc took 40 µs, and this machine needs 50 µs at least"),
        (other(times=(70.0, 100.5)), "not faster beyond noise"),  # one of its times is the usual way's
        (other(times=(99.5,)), "not faster beyond noise"),  # too little
    ],
)
def test_what_is_wrong_or_no_faster_is_refused(timed: Timed, reason: str) -> None:
    choice = decide(AS_IT_WAS, [timed], least_us=50.0)
    assert choice.way == USUAL
    assert reason in choice.refused["nhwc"]


def test_where_the_usual_way_is_below_the_speed_of_light_no_time_is_believed() -> None:
    choice = decide(AS_IT_WAS, [other()], least_us=200.0)
    assert choice.way == USUAL
    assert choice.refused["nhwc"].startswith("error: as usual took 100 µs")
    with pytest.raises(ValueError, match="was not timed"):
        decide(Timed(way=USUAL), [other()], least_us=0.0)


def test_the_users_class_bounds_the_error() -> None:
    assert decide(AS_IT_WAS, [other()], least_us=0.0, most_error=1e-4).way == USUAL


class Planted(Clock):
    """Times by the way that runs: its layout shows in the tensors that the kernels get."""

    def __init__(self, times: Callable[[str], float], *, seconds: float = 0.0) -> None:
        super().__init__(CPU)
        self.times, self.seconds, self.passed = times, seconds, 0.0
        self.rows = 0

    def now(self) -> float:
        return self.passed

    def row_us(self, search: bool | None, work: Callable[[], Any]) -> float:
        self.rows += 1
        self.passed += self.seconds
        made = []
        with mock.patch.object(choosing.ways, "laid", lambda t, layout: (made.append(layout), t)[1]):
            work()
        return self.times(made[0] if made else USUAL)


def chooser(tmp_path: Path, clock: Clock, machine: Environment | None = None) -> Chooser:
    return Chooser(CPU, machine or Environment(), Store(tmp_path / "choices.json"), clock)


def nhwc_wins(layout: str) -> float:
    return 50.0 if layout == "nhwc" else 100.0


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.fixture
def running(tmp_path: Path):
    made: list[Chooser] = []

    def start(clock: Clock, machine: Environment | None = None) -> Chooser:
        made.append(chooser(tmp_path, clock, machine))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        one.stop()


def test_each_product_is_chosen_once_and_computes_the_same(running) -> None:
    model, x = net(), torch.randn(2, 3, 9, 9)
    plain = gradients(model, x)
    clock = Planted(nhwc_wins)
    found = running(clock)
    for mine, theirs in zip(gradients(model, x), plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert {key.partition(" ")[0] for key in found.chosen} == {"forward", "datagradient", "weightgradient"}
    assert {choice.way for choice in found.chosen.values()} == {"nhwc"}
    # The first layer's input wants no gradient.
    assert found.ran == {(FORWARD, "nhwc"): 2, (DATA, "nhwc"): 1, (WEIGHT, "nhwc"): 2}
    rows = clock.rows
    gradients(model, x)
    assert clock.rows == rows
    told = conv_choice.told(found)
    assert told.passed
    assert told.numbers["saved_us"] == 5 * 50.0


def test_directions_are_chosen_each_by_itself(running) -> None:
    """A weight gradient that alone is faster another way is made in a call of its own."""
    model, x = net(), torch.randn(2, 3, 9, 9)
    plain = gradients(model, x)
    clock = Planted(nhwc_wins)
    found = running(clock)
    real = found.way
    found.way = lambda direction, *rest: choosing.AS_USUAL if direction != WEIGHT else real(direction, *rest)
    for mine, theirs in zip(gradients(model, x), plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert found.ran[WEIGHT, "nhwc"] == 2
    assert found.ran[DATA, USUAL] == 1


def test_choices_outlive_the_process_by_their_key(running, tmp_path: Path) -> None:
    model, x = net(), torch.randn(2, 3, 9, 9)
    gradients(model, x)
    running(Planted(nhwc_wins))
    gradients(model, x)
    running(again := Planted(nhwc_wins))
    gradients(model, x)
    assert again.rows == 0
    gradients(model, torch.randn(3, 3, 9, 9))  # another shape
    assert again.rows > 0
    rows = again.rows
    with torch.autocast("cpu", dtype=torch.bfloat16):  # another dtype
        model(x)
    assert again.rows > rows
    document = json.loads((tmp_path / "choices.json").read_text())
    assert all(torch.__version__ in key for key in document["choices"])


@pytest.mark.parametrize("content", ["", "[]", '{"schema_version": 0, "choices": {}}', '{"schema_version": 1}'])
def test_a_cache_that_cannot_be_read_is_empty(tmp_path: Path, content: str) -> None:
    file = tmp_path / "choices.json"
    file.write_text(content)
    store = Store(file)
    assert store.get("any") is None
    store.put("any", decide(AS_IT_WAS, [], least_us=0.0))
    assert Store(file).get("any") == store.get("any") is not None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Store(tmp_path / "file" / "choices.json").put("any", decide(AS_IT_WAS, [], least_us=0.0))


def test_the_time_is_bounded(running) -> None:
    """A second a row: the first products use up what there is, and the others go as usual."""
    clock = Planted(nhwc_wins, seconds=1.0)
    found = running(clock)
    for size in range(8, 30):
        F.conv2d(torch.randn(1, 2, size, size), torch.randn(2, 2, 3, 3))
    assert found.spent_s <= choosing.BUDGET_S + 2 * choosing.PRODUCT_S
    assert found.failed
    assert set(found.failed.values()) == {"the 20 s for choices were over"}
    assert len(found.chosen) + len(found.failed) == 22


def test_a_time_below_the_speed_of_light_is_refused(running) -> None:
    slow = Environment(copy_gbps=1e-3)  # a megabyte a second
    found = running(Planted(nhwc_wins), slow)
    F.conv2d(torch.randn(1, 2, 9, 9), torch.randn(2, 2, 3, 3))
    (choice,) = found.chosen.values()
    assert choice.way == USUAL
    assert "error: as usual took 100 µs, and this machine needs" in choice.refused["nhwc"]


def test_what_a_stride_steps_over_is_no_byte_to_move(running) -> None:
    """Seen on an H200: a 1 x 1 of stride 2 reads a fourth of its input, and its weight's gradient took less than all of it would."""
    slow = Environment(copy_gbps=3e-3)  # 300 bytes in the 100 us that the usual way takes, of 664
    found = running(Planted(nhwc_wins), slow)
    weight = torch.randn(2, 2, 1, 1, requires_grad=True)
    F.conv2d(torch.randn(1, 2, 9, 9), weight, stride=3).sum().backward()
    assert not [why for choice in found.chosen.values() for why in choice.refused.values() if why.startswith("error:")]


def test_a_way_that_is_wrong_is_not_taken(running, monkeypatch: pytest.MonkeyPatch) -> None:
    made = choosing.ways.made_forward
    monkeypatch.setattr(
        choosing.ways,
        "made_forward",
        lambda kernels, way, *rest: made(kernels, way, *rest) * (1.001 if way.layout else 1.0),
    )
    found = running(Planted(nhwc_wins))
    F.conv2d(torch.randn(1, 2, 9, 9), torch.randn(2, 2, 3, 3))
    (choice,) = found.chosen.values()
    assert choice.way == USUAL
    assert choice.refused["nhwc"].startswith("error 1.0e-03")


def test_what_cannot_be_timed_runs_as_usual(running, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object) -> None:
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(choosing.ways, "exact_part", none)
    found = running(Planted(nhwc_wins))
    x, weight = torch.randn(1, 2, 9, 9), torch.randn(2, 2, 3, 3)
    assert F.conv2d(x, weight).shape == (1, 2, 7, 7)
    assert list(found.failed.values()) == ["CUDA out of memory"]


def test_other_convolutions_are_left_alone(running) -> None:
    found = running(Planted(nhwc_wins))
    x = torch.randn(1, 2, 9, 9, requires_grad=True)
    F.conv_transpose2d(x, torch.randn(2, 2, 3, 3)).sum().backward()
    F.conv1d(torch.randn(1, 2, 9), torch.randn(2, 2, 3))
    F.conv3d(torch.randn(1, 2, 5, 5, 5), torch.randn(2, 2, 3, 3, 3))
    F.conv2d(torch.randn(0, 2, 9, 9), torch.randn(2, 2, 3, 3))
    assert not found.ran


def test_second_derivatives_and_compiled_graphs_go_through_it(running) -> None:
    x, weight = torch.randn(1, 2, 9, 9, requires_grad=True), torch.randn(2, 2, 3, 3, requires_grad=True)

    def penalty() -> list[torch.Tensor]:
        (gradient,) = torch.autograd.grad(F.conv2d(x, weight).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), (x, weight)))

    plain = penalty()
    found = running(Planted(nhwc_wins))
    for mine, theirs in zip(penalty(), plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-2)
    torch._dynamo.reset()
    model = torch.compile(net(), backend="aot_eager")
    before = found.ran.total()
    model(torch.randn(2, 3, 9, 9)).sum().backward()
    assert found.ran.total() > before


def test_replicas_of_ddp_go_through_it(running, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        found = running(Planted(nhwc_wins))
        model = nn.parallel.DistributedDataParallel(net())
        assert all(gradient is not None for gradient in gradients(model, torch.randn(2, 3, 9, 9)))
    finally:
        torch.distributed.destroy_process_group()
    assert found.ran[WEIGHT, "nhwc"] == 2


def test_what_is_taken_away_leaves_no_trace(tmp_path: Path) -> None:
    found = chooser(tmp_path, Planted(nhwc_wins))
    found.start()
    found.stop()
    F.conv2d(torch.randn(1, 2, 9, 9), torch.randn(2, 2, 3, 3))
    assert not found.ran


def test_nothing_is_timed_while_a_graph_is_captured(tmp_path: Path) -> None:
    found = chooser(tmp_path, Planted(nhwc_wins))
    found.device = torch.device("cuda")
    x, weight = torch.randn(1, 2, 9, 9), torch.randn(2, 2, 3, 3)
    numbers = choosing.Numbers((1, 1), (0, 0), (1, 1), 1)
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(torch.cuda, "get_device_name", return_value="a GPU"),
    ):
        way = found.way(FORWARD, (x, weight), numbers, lambda way: lambda: x, lambda y: y)
    assert way == choosing.AS_USUAL
    assert not found.chosen


def test_the_transform_goes_on_and_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loop = make_loop(steps=1)
    transform = conv_choice.ConvChoice()
    before = fingerprint(loop)
    assert transform.match(loop.training, {}).reason == "the step does not run on cuDNN"
    assert transform.effect(loop.training, None, None).passed is False
    undo = transform.apply(loop.training, {})
    assert transform.effect(loop.training, None, None).detail == "no convolution was called"
    model = copy.deepcopy(loop.training.roots[0].module)
    conv = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    conv(torch.randn(2, conv.in_channels, 8, 8))
    assert transform.effect(loop.training, None, None).numbers["products"] == 1
    undo.run()
    assert fingerprint(loop) == before
    loop.training.device = torch.device("cuda")
    with mock.patch.object(torch.backends.cudnn, "version", return_value=90000):
        assert transform.match(loop.training, {}).sites == ("conv1", "conv2", "conv3")
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            assert "deterministic" in transform.match(loop.training, {}).reason
        loop.training.fixed_shapes = False
        assert "shapes change" in transform.match(loop.training, {}).reason
    monkeypatch.delattr(torch.library, "get_kernel")
    assert "has no torch.library.get_kernel" in transform.match(loop.training, {}).reason
