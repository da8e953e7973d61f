"""The batch-norm operation without a GPU: reference, launch geometry, what is supported, fallback, graph matching."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dynamo, match, storage
from advisor.ops.batchnorm_act import reference, spec
from advisor.ops.batchnorm_act.rewrite import rewrite

FAMILY = catalog.get("batchnorm_act")


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ["none", "silu", "hardswish", "gelu", "leaky_relu"])
def test_reference_passes_gradcheck(activation: str, residual: bool) -> None:
    torch.manual_seed(0)
    shape = (3, 2, 2, 2)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    r = torch.randn(shape, dtype=torch.float64, requires_grad=True) if residual else None
    w, b = (torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def f(*tensors: torch.Tensor) -> torch.Tensor:
        buffers = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        x, w, b, *rest = tensors
        return reference.batchnorm_act(x, rest[0] if rest else None, *buffers, w, b, 0.1, 1e-5, activation, 0.1)

    assert torch.autograd.gradcheck(f, (x, w, b, *([r] if r is not None else [])))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_frozen_reference_passes_gradcheck(activation: str, affine: bool) -> None:
    torch.manual_seed(0)
    x, r = (torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mean, var, w, b = (torch.rand(2, dtype=torch.float64) + 0.5 for _ in range(4))
    parameters = (w.requires_grad_(), b.requires_grad_()) if affine else (None, None)

    def f(x: torch.Tensor, r: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return reference.frozen_batchnorm_act(x, r, mean, var, *parameters, 1e-5, activation)

    assert torch.autograd.gradcheck(f, (x, r, *(parameters if affine else ())))
    kept = mean.clone()
    f(x, r)
    assert torch.equal(mean, kept)


@given(
    rows=st.integers(2, 200_000),
    vectors=st.integers(1, 600),
    dtype=st.sampled_from(sorted(storage.STORAGE)),
    sms=st.integers(1, 200),
    source=st.sampled_from(sorted(spec.HELD_ROWS)),
)
def test_a_cluster_holds_every_row_of_its_tile(rows: int, vectors: int, dtype: str, sms: int, source: str) -> None:
    shape = spec.held(source, rows, vectors * storage.vector_width(dtype), dtype, sm_count=sms)
    holds = spec.HELD_CLUSTER * spec.held_threads(source) * spec.HELD_ROWS[source]
    if shape is None:
        assert rows > holds
        return
    assert shape.tile in (1, 2, 4, 8)
    assert rows * shape.tile <= holds
    assert shape.vectors == vectors
    assert shape.tile * (shape.tiles - 1) < vectors <= shape.tile * shape.tiles
    assert shape.tile == 1 or shape.tile // 2 < vectors  # no wider than the row
    assert shape.tile * 2 * storage.vector_width(dtype) <= spec.held_threads(source)  # a thread a sum


@given(
    rows=st.integers(2, 300_000),
    vectors=st.integers(1, 600),
    dtype=st.sampled_from(sorted(storage.STORAGE)),
    sms=st.integers(1, 200),
    source=st.sampled_from((spec.GRID_FORWARD, spec.GRID_BACKWARD)),
    activation=st.sampled_from(sorted(spec.RESIDUAL_ACTIVATIONS)),
    forked=st.booleans(),
    arch=st.sampled_from((80, 86, 90)),
)
def test_the_chip_holds_every_row_of_a_tile(
    rows: int, vectors: int, dtype: str, sms: int, source: str, activation: str, forked: bool, arch: int
) -> None:
    channels, forked = vectors * storage.vector_width(dtype), forked and source == spec.GRID_BACKWARD
    shape = spec.grid(source, rows, channels, dtype, activation, residual=True, forked=forked, sm_count=sms, arch=arch)
    if shape is None:
        assert vectors > sms  # a row is wider than the blocks
        return
    hold = spec.grid_rows(source, activation, True, forked=forked, streams=shape.streams, whole=shape.whole)
    slots = spec.grid_slots(source, arch, dtype, whole=shape.whole)
    tensors = 2 if source == spec.GRID_BACKWARD else 1
    assert 1 <= shape.tile <= min(vectors, spec.MAX_GRID_TILE) or shape.tile == vectors <= spec.MAX_WHOLE_ROW
    assert shape.tile * (shape.tiles - 1) < vectors <= shape.tile * shape.tiles
    assert shape.blocks * shape.tiles <= sms
    held = (hold + shape.kept) * shape.blocks * (spec.GRID_THREADS // shape.tile)
    assert shape.again == max(0, rows - held)
    if shape.again:  # all that can be is kept, and with all of the chip's rows it would not fit
        assert slots - tensors < tensors * shape.kept <= slots
        chip = sms * spec.GRID_THREADS * (2 + slots // tensors)
        assert rows * vectors > 0.6 * chip - 2 * spec.GRID_THREADS * sms
    assert tensors * shape.kept + shape.ahead == shape.slots <= slots
    if shape.whole:  # a thread for two channels, and a warp for two of a block's own
        assert channels <= 2 * spec.GRID_THREADS
        assert -(-channels // (2 * shape.blocks)) <= spec.GRID_THREADS // 32
    else:
        assert shape.tile * storage.vector_width(dtype) <= spec.GRID_THREADS  # a thread a channel
        assert 2 * shape.tile * storage.vector_width(dtype) // 4 <= spec.GRID_THREADS


@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [
        ((128, 64, 32, 32), (8, 132, 12, 12), (8, 132, 12)),
        ((128, 128, 16, 16), (8, 132, 4, 8), (8, 132, 4)),
        ((128, 512, 4, 4), (8, 128, 0, 2), (8, 128, 0)),
        ((256, 256, 14, 14), (8, 132, 20, 4), (8, 132, 12)),
        ((256, 512, 7, 7), (8, 128, 9, 13), (8, 128, 9)),
        ((256, 960, 7, 7), (8, 120, 21, 3), (16, 128, 12)),
        ((256, 192, 28, 28), (8, 132, 24, 0), (8, 132, 12)),  # not of twelve, which split a line
        ((256, 80, 14, 14), (10, 132, 4, 8), (10, 132, 4)),
        ((256, 40, 28, 28), (5, 132, 11, 13), (5, 132, 11)),
        ((256, 384, 14, 14), (16, 132, 24, 0), (16, 132, 12)),
    ],
)
def test_tensors_of_some_megabytes_lie_on_the_h200(shape: tuple[int, ...], forward: object, backward: object) -> None:
    n, c, h, w = shape
    found = [
        spec.grid(source, n * h * w, c, "bfloat16", "relu", residual=True, sm_count=132, arch=90)
        for source in (spec.GRID_FORWARD, spec.GRID_BACKWARD)
    ]
    one, other = found
    assert forward == (one and (one.tile, one.tiles * one.blocks, one.kept, one.ahead))
    assert backward == (other and (other.tile, other.tiles * other.blocks, other.kept))


def test_the_shared_memory_asked_for_is_what_a_block_may_have() -> None:
    for dtype, scratch in (("bfloat16", 16 * 512 * 4), ("float32", 8 * 512 * 4)):
        for source, whole, channels in (
            (spec.GRID_FORWARD, False, 5 * 16),
            (spec.GRID_BACKWARD, False, 5 * 16),
            (spec.GRID_FORWARD, True, 3 * 96),
            (spec.GRID_BACKWARD, True, 5 * 96),
        ):
            constants = channels * storage.vector_width(dtype) * 4
            assert scratch + constants <= 48 << 10  # static
            for arch, kib in ((80, 163), (86, 99), (90, 227)):
                slots = spec.grid_slots(source, arch, dtype, whole=whole)
                used = slots * 16 * spec.GRID_THREADS + scratch + constants
                assert kib * 1024 - 16 * spec.GRID_THREADS < used <= kib * 1024


@pytest.mark.parametrize(
    ("shape", "tile", "blocks"),
    [((128, 512, 4, 4), 4, 128), ((128, 256, 8, 8), 2, 128), ((128, 128, 16, 16), 1, 128), ((256, 2048, 7, 7), 4, 512)],
)
def test_small_tensors_spread_over_the_h200(shape: tuple[int, ...], tile: int, blocks: int) -> None:
    n, c, h, w = shape
    found = spec.held(spec.HELD_FORWARD, n * h * w, c, "bfloat16", sm_count=132)
    assert (found.tile, found.tiles * spec.HELD_CLUSTER) == (tile, blocks)
    assert spec.held(spec.HELD_FORWARD, 131072, 64, "bfloat16", sm_count=132) is None  # 128x64x32x32


def test_nothing_takes_one_launch_that_was_not_measured_to_win() -> None:
    small, least, most = spec.HELD_BYTES, spec.GRID_LEAST_BYTES, spec.GRID_MOST_BYTES
    assert spec.ways(small + 1, False, alone=False) == (spec.TWO,)
    assert spec.ways(small, False, alone=False) == (spec.CLUSTER, spec.TWO)
    assert spec.ways(small, True, alone=False) == (spec.TWO,)
    assert spec.ways(small // 2, True, alone=False) == (spec.CLUSTER, spec.TWO)
    assert spec.ways(least - 1, True) == (spec.CLUSTER, spec.TWO)
    assert spec.ways(least, True) == (spec.GRID, spec.CLUSTER, spec.TWO)
    for residual in (False, True):
        assert spec.ways(most, residual) == (spec.GRID, spec.TWO)
        assert spec.ways(most + 1, residual) == (spec.TWO,)


TWO, TILES, WHOLE = "two launches", "one, in tiles", "one, of whole rows"


@pytest.mark.parametrize(
    ("shape", "arch", "residual", "forward", "backward"),
    [
        ((256, 1024, 14, 14), 90, False, TILES, TILES),
        ((256, 1024, 14, 14), 80, False, TWO, TWO),  # not measured
        ((256, 1024, 14, 14), 90, True, TILES, TWO),
        ((256, 512, 28, 28), 90, False, TWO, TWO),
        ((128, 64, 32, 32), 80, False, TILES, TWO),  # held on chip
        ((256, 72, 56, 56), 90, False, TILES, TILES),  # a tile is a row and splits no line
        ((256, 72, 56, 56), 90, True, TILES, TILES),
        ((256, 960, 7, 7), 90, False, TILES, TILES),  # tiles split lines, but what is read twice lies in L2
        ((256, 576, 14, 14), 90, False, TILES, TILES),  # tiles of a line
        ((256, 672, 14, 14), 90, False, TILES, WHOLE),  # tiles of 14 vectors split lines
        ((256, 672, 14, 14), 90, True, WHOLE, WHOLE),
        ((256, 432, 14, 14), 90, True, WHOLE, WHOLE),
        ((256, 336, 14, 14), 90, True, TILES, WHOLE),  # as there, but that costs a second exchange
        ((256, 240, 14, 14), 90, False, TILES, TILES),
        ((256, 240, 28, 28), 90, False, WHOLE, WHOLE),
        ((256, 240, 28, 28), 90, True, WHOLE, WHOLE),
        ((256, 152, 28, 28), 90, False, WHOLE, WHOLE),  # tiles split sectors
        ((256, 152, 14, 14), 90, False, TILES, WHOLE),
        ((256, 1016, 14, 14), 90, False, TILES, TWO),  # rows are wider than a block takes whole
        ((256, 58, 28, 28), 90, False, WHOLE, WHOLE),  # four rows for one
        ((256, 162, 28, 28), 90, True, WHOLE, WHOLE),
        ((32, 58, 28, 28), 80, False, WHOLE, WHOLE),
        ((256, 110, 28, 28), 80, False, TWO, TWO),
    ],
)
def test_a_pass_is_launched_as_was_measured_to_win(
    shape: tuple[int, ...], arch: int, residual: bool, forward: str, backward: str
) -> None:
    n, c, h, w = shape
    joined = spec.joined(c, "bfloat16")
    for of, expected in ((False, forward), (True, backward)):
        size = {"residual": residual, "forked": False, "backward": of, "sm_count": 132, "arch": arch}
        _, found = spec.launch(n * h * w // joined, c * joined, "bfloat16", "relu", joined=joined, **size)
        assert (TWO if found is None else WHOLE if found.whole else TILES) == expected


@pytest.mark.parametrize("sm_count", [16, 132, 160])
def test_the_exchange_has_room_for_the_sums_of_every_launch(sm_count: int) -> None:
    room = spec.grid_exchange(sm_count)
    assert room % 4 == 0  # its second half is read in fours too
    for channels, dtype in product((8, 64, 72, 672, 1016, 2048), ("bfloat16", "float32")):
        for rows in (98, 2048, 50176):
            shape = spec.grid(
                spec.GRID_FORWARD, rows, channels, dtype, "relu", residual=False, sm_count=sm_count, arch=90
            )
            if shape is None:
                continue
            if shape.whole:
                assert 2 * (channels + channels % 2) * (shape.blocks + spec.GRID_COPIES) <= room
            else:
                assert shape.tiles * shape.blocks * 2 * shape.tile * storage.vector_width(dtype) <= room


def test_what_is_read_twice_counts_twice() -> None:
    rows, channels, on = 256 * 14 * 14, 1024, {"sm_count": 132, "arch": 90}
    size = 2 * rows * channels
    for backward, residual, forked, once, again in (
        (False, False, False, 2, 1),
        (False, True, False, 3, 1),
        (True, False, False, 3, 2),
        (True, False, True, 4, 3),
        (True, True, False, 4, 2),
        (True, True, True, 5, 2),
    ):
        kinds = {"residual": residual, "forked": forked, "backward": backward}
        _, shape = spec.launch(rows, channels, "bfloat16", "relu", **kinds, **on, way=spec.GRID)
        assert 0.6 * rows < shape.again < 0.9 * rows
        _, moved = spec.work(rows, channels, "bfloat16", "relu", **kinds, **on, way=spec.GRID)
        mask = rows * channels // 8 if residual else 0
        assert moved == once * size + mask + again * shape.again * channels * 2


def test_moments_are_left_where_one_launch_does_not_hold_the_tensor() -> None:
    assert spec.takes_moments(spec.GRID_HELD_BYTES + 1, False) == ""  # though it would be one launch without
    assert spec.takes_moments(spec.GRID_HELD_BYTES, False) == spec.takes_moments(1 << 20, False) != ""


@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [
        ((33, 64, 16, 16), spec.HELD_FORWARD, spec.HELD_BACKWARD),
        ((128, 512, 4, 4), spec.GRID_FORWARD, spec.GRID_BACKWARD),
        ((128, 64, 32, 32), spec.GRID_FORWARD, spec.GRID_BACKWARD),
        ((256, 256, 14, 14), spec.GRID_FORWARD, spec.GRID_BACKWARD),
        ((256, 2048, 7, 7), spec.GRID_FORWARD, spec.BACKWARD),
        ((256, 256, 56, 56), spec.FORWARD, spec.BACKWARD),
    ],
)
@pytest.mark.parametrize("forked", [False, True])
def test_the_fastest_launch_that_fits_is_taken(
    shape: tuple[int, ...], forward: str, backward: str, forked: bool
) -> None:
    n, c, h, w = shape
    taken = [
        spec.launch(n * h * w, c, "bfloat16", "relu", residual=True, forked=forked, backward=of, sm_count=132, arch=90)[
            0
        ]
        for of in (False, True)
    ]
    assert taken == [forward, backward]


@given(
    rows=st.integers(2, 5_000_000),
    vectors=st.integers(1, 600),
    dtype=st.sampled_from(sorted(storage.STORAGE)),
    sms=st.integers(1, 200),
    per_sm=st.integers(1, 2),
)
def test_geometry_covers_every_channel_and_row(rows: int, vectors: int, dtype: str, sms: int, per_sm: int) -> None:
    shape = spec.geometry(rows, vectors * storage.vector_width(dtype), dtype, sms, per_sm)
    assert shape.vectors == vectors
    assert 1 <= shape.tile <= spec.MAX_TILE
    assert shape.tile * shape.tiles >= vectors
    assert shape.tile * (shape.tiles - 1) < vectors
    assert shape.row_blocks >= 1
    assert shape.row_blocks * shape.tiles <= max(sms * per_sm, shape.tiles)  # no second wave
    assert spec.THREADS // shape.tile >= 1
    assert shape.tiles <= 1024  # one counter a tile


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"arch": 75}, "older"),
        ({"dtype": "float64"}, "dtype"),
        ({"shape": (2, 64, 8)}, "3-D"),
        ({"channels_last": False}, "channels_last"),
        ({"shape": (2, 60, 8, 8)}, "no multiple of 8"),
        ({"shape": (1, 64, 1, 1)}, "two values"),
        ({"activation": "silu", "residual": True}, "residual with silu"),
    ],
)
def test_unsupported_says_why(change: dict, reason: str) -> None:
    call = {
        "shape": (2, 64, 8, 8),
        "channels_last": True,
        "dtype": "bfloat16",
        "activation": "relu",
        "residual": False,
        "arch": 90,
    }
    answer = spec.unsupported(**{**call, **change})
    assert reason in answer if reason else answer == ""


class Functional(nn.Module):
    """Blocks as people write them: functional ReLU, in-place add, a projection shortcut, other activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.short, self.bn3 = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)
        self.tail = nn.Sequential(
            nn.Conv2d(16, 24, 1),
            nn.BatchNorm2d(24),
            nn.Hardswish(),
            nn.Conv2d(24, 24, 1),
            nn.BatchNorm2d(24),
            nn.ReLU6(True),
        )
        self.odd = nn.BatchNorm2d(24, momentum=None)
        self.narrow = nn.Conv2d(24, 5, 1)
        self.bn5 = nn.BatchNorm2d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(x))
        out += self.bn3(self.short(x))
        out = torch.relu(out)
        out = self.odd(self.tail(out)) + 1.0
        return F.relu(self.bn5(self.narrow(out))).mean((2, 3))


def capture(model: nn.Module) -> tuple[match.MatchReport, object]:
    torch._dynamo.reset()
    report = match.MatchReport()
    backend = dynamo.backend({"batchnorm_act": report}, mode=None)
    return report, torch.compile(model.forward, backend=backend, dynamic=False)


@pytest.fixture
def captured() -> tuple[Functional, match.MatchReport, object]:
    torch.manual_seed(0)
    model = Functional().train()
    with dispatch.everything():
        yield model, *capture(model)
    torch._dynamo.reset()


def test_patterns_are_found_by_path(captured) -> None:
    _, report, run = captured
    run(torch.randn(4, 3, 8, 8))
    assert report.matched == {
        "bn1": "bn+relu",
        "bn2": "bn+add+relu",
        "bn3": "bn",
        "tail.1": "bn+hardswish",
        "tail.4": "bn+relu6",
        "bn5": "bn+relu (joined rows)",
    }
    assert "odd" not in report.matched  # momentum=None reads a counter: Dynamo leaves that batch norm out of the graph


@pytest.mark.parametrize(
    ("channels", "dtype", "rows"),
    [
        (64, "bfloat16", 1),
        (58, "bfloat16", 4),
        (116, "float16", 2),
        (27, "bfloat16", 8),
        (58, "float32", 2),
        (60, "float32", 1),
    ],
)
def test_as_many_rows_are_joined_as_have_whole_vectors(channels: int, dtype: str, rows: int) -> None:
    assert spec.joined(channels, dtype) == rows
    assert rows * channels % storage.vector_width(dtype) == 0


@pytest.mark.parametrize(
    ("shape", "joins", "reason"),
    [
        ((8, 58, 28, 28), True, ""),
        ((8, 58, 28, 28), False, "58 channels are no multiple of 8"),
        ((3, 58, 7, 7), True, "147 pixels are no multiple of 4"),
        ((1, 58, 2, 2), True, "fewer than two values a channel and of 4 pixels"),
        ((2, 58, 2, 2), True, ""),
        ((1, 64, 1, 1), True, "fewer than two values a channel"),
    ],
)
def test_what_rows_can_be_joined(shape: tuple[int, ...], joins: bool, reason: str) -> None:
    call = {"channels_last": True, "dtype": "bfloat16", "activation": "relu", "residual": False, "arch": 90}
    assert spec.unsupported(shape=shape, joins=joins, **call).startswith(reason)
    assert bool(spec.unsupported(shape=shape, joins=joins, **call)) == bool(reason)


def test_rewritten_graph_trains_as_the_plain_model(captured) -> None:
    model, _, run = captured
    plain = Functional().train()
    plain.load_state_dict(model.state_dict())
    for _ in range(3):
        x = torch.randn(4, 3, 8, 8)
        FAMILY.fell_back.clear()
        run(x).square().sum().backward()
        assert FAMILY.fell_back["not on a CUDA device"] == 6
        plain(x).square().sum().backward()
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, msg=name)
    for (name, mine), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other, msg=name)  # running statistics and num_batches_tracked


def test_an_input_changed_in_place_is_left_alone() -> None:
    class Hazard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.conv(x)
            y = self.bn(h)
            h.mul_(2.0)
            return F.relu(y) + h

    report, run = capture(Hazard().train())
    run(torch.randn(2, 3, 4, 4))
    assert report.matched == {}
    assert "in place" in report.unmatched["bn"]


def test_what_does_not_win_is_left_in_the_graph() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.second(F.relu(self.first(x)))).sum()

    model = Two().train()
    report, run = capture(model)
    run(torch.randn(2, 8, 4, 4))
    assert report.matched == {"first": "bn+relu"}
    assert "nothing to fuse" in report.unmatched["second"]
    report, run = capture(model.bfloat16().float())
    with torch.autocast("cpu", torch.bfloat16):  # bf16: the norm alone wins, so the activation is left to PyTorch
        run(torch.randn(2, 8, 4, 4).bfloat16())
    assert report.matched == {"first": "bn+relu", "second": "bn"}


def test_what_inductor_fuses_itself_is_left_to_it() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.plain = nn.BatchNorm2d(8).eval(), nn.BatchNorm2d(8, affine=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.plain(F.relu(self.frozen(x)))).sum()

    model = Two()
    graphs = []
    torch._dynamo.reset()
    torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph)(torch.randn(2, 8, 4, 4))
    for compiled in (True, False):
        report = match.MatchReport()
        rewrite(copy.deepcopy(graphs[0]), report, compiled=compiled)
        left = {path: reason.split(":")[-1].strip() for path, reason in report.unmatched.items()}
        assert left == (dict.fromkeys(("frozen", "plain"), "left to Inductor") if compiled else {})
    torch._dynamo.reset()


class Twice(nn.Module):
    """One norm called twice in a forward: the second call goes on from what the first has made of the statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other, self.pool = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(x))
        return self.pool(F.relu(self.norm(F.relu(self.other(2 * x)))))


def test_a_norm_that_is_called_twice_counts_and_averages_both() -> None:
    torch._dynamo.reset()
    model, plain = Twice(), Twice()
    graphs: list[torch.fx.GraphModule] = []
    report = match.MatchReport()
    put_in = dynamo.backend({"batchnorm_act": report}, mode=None)

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(copy.deepcopy(graph))
        graphs.append(graph)
        return put_in(graph, inputs)

    x = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.compile(model.forward, backend=backend)(x)
    plain(x)
    assert len(report.matched) == 3
    for (name, mine), want in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, want, msg=name)
    captured, rewritten = graphs
    # One multi-tensor launch that names a tensor twice would write to it from two blocks at a time.
    assert torch._foreach_add_ not in {node.target for node in rewritten.graph.nodes}
    for family in ("batchnorm_max_pool", "batchnorm_act"):
        report = match.MatchReport()
        catalog.get(family).rewrite(copy.deepcopy(captured), report, compiled=True)
        assert list(report.matched) == (["other"] if family == "batchnorm_act" else [])
        assert all("used elsewhere too" in reason for reason in report.unmatched.values())
        assert report.unmatched
    torch._dynamo.reset()


class PreActivation(nn.Module):
    """ResNetV2's and DenseNet's order: norm and activation before each convolution, on a sum or a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(8), nn.Conv2d(8, 16, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(16), nn.Conv2d(16, 8, 3, padding=1, bias=False)
        self.norm3, self.conv3 = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1, bias=False)
        self.last = nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = F.relu(self.norm1(x))
        x = self.conv2(F.relu(self.norm2(self.conv1(before)), inplace=True)) + before + x
        x = torch.cat([x, before], 1)
        x = x + self.conv3(F.relu(self.norm3(x)))
        return F.relu(self.last(x), inplace=True).mean((2, 3))


def test_norms_that_stand_before_their_convolutions_are_found() -> None:
    report, run = capture(PreActivation().train())
    run(torch.randn(2, 8, 6, 6))
    assert report.matched == dict.fromkeys(("norm1", "norm2", "norm3", "last"), "bn+relu")
    assert not report.unmatched


@pytest.mark.parametrize(
    ("activation", "residual", "reason"),
    [
        ("relu", True, ""),
        ("none", True, ""),
        ("none", False, ""),
        ("silu", False, ""),
        ("gelu", False, dispatch.UNMEASURED),
    ],
)
def test_where_two_gradients_win(activation: str, residual: bool, reason: str) -> None:
    assert spec.wins(activation=activation, residual=residual, dtype="bfloat16", variant=spec.FORKED) == reason


@pytest.mark.parametrize(
    ("activation", "residual", "dtype", "reason"),
    [
        ("relu", False, "float32", ""),
        ("relu", True, "float16", ""),
        ("none", True, "float32", ""),
        ("none", False, "bfloat16", ""),
        ("hardswish", False, "bfloat16", ""),
        ("none", False, "float16", ""),
        ("none", False, "float32", "nothing to fuse"),
        ("gelu", False, "bfloat16", ""),
    ],
)
def test_where_it_wins(activation: str, residual: bool, dtype: str, reason: str) -> None:
    answer = spec.wins(activation=activation, residual=residual, dtype=dtype)
    assert reason in answer if reason else answer == ""
