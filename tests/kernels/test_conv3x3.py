"""3 x 3 convolution between few channels without a GPU: definition, launch geometry, what is supported, emulated kernels, matching."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from emulation.device import only_what_wins
from emulation.planted import passes_with
from emulation.supports import unsupported
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dispatch_table, match, sources, verify
from advisor.ops.conv3x3 import api, cases, reference, spec, weight
from advisor.ops.exact_conv import spec as exact
from advisor.ops.grouped import wide

FAMILY = catalog.get("conv3x3")


def nhwc(*shape: int, seed: int = 0) -> torch.Tensor:
    n, c, h, w = shape
    return torch.randn(n, h, w, c, generator=torch.Generator().manual_seed(seed)).permute(0, 3, 1, 2)


def test_the_definition_is_pytorchs_and_passes_gradcheck() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(reference.conv3x3(x, weight), F.conv2d(x, weight, None, 1, 1))
    assert torch.autograd.gradcheck(reference.conv3x3, (x, weight), fast_mode=True)


@given(
    batch=st.integers(1, 300),
    inputs=st.sampled_from(spec.INPUTS),
    outputs=st.sampled_from(spec.OUTPUTS),
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    turned=st.booleans(),
    sm_count=st.integers(1, 200),
)
def test_a_plan_covers_every_pixel_within_shared_memory(
    batch: int, inputs: int, outputs: int, height: int, width: int, turned: bool, sm_count: int
) -> None:
    product = spec.Conv3x3(batch, inputs, outputs, height, width, turned)
    assume(not spec.product_wins(product).startswith("products from"))
    plan = spec.plan(product, sm_count)
    rows = plan.columns // 8
    assert rows * plan.bands >= height > rows * (plan.bands - 1)
    assert 8 * plan.strips >= width > 8 * (plan.strips - 1)
    assert plan.tiles == batch * plan.bands * plan.strips
    assert 1 <= plan.grid <= min(plan.tiles, sm_count)
    assert spec.STAGES % (2 * inputs // 64) == 0  # a stage is one warpgroup's alone
    assert -(-outputs // 64) * plan.columns <= spec.SUMS  # registers of a warpgroup
    lines, kept = (outputs, inputs) if turned else (inputs, outputs)
    needed = 9 * -(-lines // 64) * kept * 128 + spec.STAGES * ((rows + 2) * spec.PITCH * 128 + 16)
    assert needed <= plan.shared_bytes <= 227 * 1024
    assert plan.shared_bytes % 1024 == 0


def taken_wrongly(stages: int, chunks: int, seed: int, tiles: int = 12) -> str:
    """What goes wrong in conv3x3.cu's ring of stages when whoever can go on does so in any order; "" where nothing does.

    A barrier tells its phases apart by parity alone: who waits for the end of phase n passes whenever the phase under way is of
    the other parity.
    """
    draw = random.Random(seed)
    full, empty, held = [0] * stages, [0] * stages, [-1] * stages
    coming: list[int] = []  # items whose copy is under way, which ends at any time
    todo = {
        "copies": list(range(tiles * chunks)),
        **{group: [i for i in range(tiles * chunks) if i // chunks % 2 == group] for group in (0, 1)},
    }
    while any(todo.values()):
        able: list[tuple[object, int]] = [("arrives", item) for item in coming]
        for who, items in todo.items():
            if items:
                at, turn = items[0] % stages, items[0] // stages
                passes = empty[at] % 2 != (turn + 1) % 2 if who == "copies" else full[at] % 2 != turn % 2
                able += [(who, items[0])] if passes else []
        if not able:
            return "nobody can go on"
        who, item = draw.choice(able)
        at = item % stages
        if who == "arrives":
            coming.remove(item)
            held[at] = item
            full[at] += 1
        elif who == "copies":
            coming.append(todo["copies"].pop(0))
        elif held[at] != item:
            return f"stage {at} holds tile {held[at]} for {item}"
        else:
            todo[who].pop(0)
            empty[at] += 1
    return ""


@pytest.mark.parametrize("chunks", [inputs // 64 for inputs in spec.INPUTS])
def test_no_warpgroup_takes_a_stage_for_another_filling(chunks: int) -> None:
    assert not any(taken_wrongly(spec.STAGES, chunks, seed) for seed in range(300))


@pytest.mark.parametrize(("stages", "chunks"), [(3, 1), (2, 2), (3, 2)])
def test_with_stages_that_both_warpgroups_use_one_would(stages: int, chunks: int) -> None:
    assert any(taken_wrongly(stages, chunks, seed) for seed in range(300))


@pytest.mark.parametrize(
    ("product", "columns"),
    [
        ((128, 64, 64, 32, 32), 128),
        ((256, 64, 64, 56, 56), 224),
        ((128, 64, 64, 224, 224), 224),
        ((256, 128, 32, 28, 28), 224),
        ((256, 128, 32, 14, 14), 112),
        ((32, 128, 64, 256, 256), 112),
    ],
)
def test_tiles_are_high_where_the_image_is(product: tuple[int, ...], columns: int) -> None:
    assert spec.plan(spec.Conv3x3(*product), 132).columns == columns


@given(
    batch=st.integers(1, 300),
    inputs=st.sampled_from((32, 64, 96, 128)),
    outputs=st.sampled_from((32, 64, 96, 128)),
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    sm_count=st.integers(1, 200),
)
def test_the_weights_blocks_cover_every_pixel_and_channel(
    batch: int, inputs: int, outputs: int, height: int, width: int, sm_count: int
) -> None:
    call = spec.Conv3x3(batch, inputs, outputs, height, width)
    plan = spec.weight_plan(call, sm_count)
    windowed, plain = (inputs, outputs) if plan.x_windowed else (outputs, inputs)
    assert plan.jobs == -(-plain // 64) * windowed // plan.columns
    assert windowed % plan.columns == 0
    assert plan.rows * plan.bands >= height > plan.rows * (plan.bands - 1)
    assert 8 * plan.wide * plan.strips >= width > 8 * plan.wide * (plan.strips - 1)
    assert plan.tiles == batch * plan.bands * plan.strips
    assert 1 <= plan.lines <= plan.tiles
    assert plan.lines * plan.jobs <= max(sm_count, plan.jobs)
    assert plan.rows % 2 == 0 or plan.wide == 2  # 16 pixels a product
    assert plan.rows * plan.wide // 2 <= 64  # products of a tile under way at once in the emulation
    assert plan.stages >= 2
    assert plan.shared_bytes <= 227 * 1024


@pytest.mark.parametrize(
    ("call", "cut"),
    [
        ((128, 64, 64, 32, 32), (True, 32, 8, 2, 8)),
        ((256, 64, 64, 56, 56), (True, 64, 14, 1, 6)),
        ((128, 64, 64, 224, 224), (True, 64, 16, 2, 3)),
        ((256, 128, 32, 56, 56), (False, 32, 28, 1, 4)),
        ((256, 128, 32, 28, 28), (False, 32, 14, 1, 8)),
        ((32, 128, 64, 256, 256), (False, 64, 16, 2, 3)),
        ((128, 64, 128, 112, 112), (True, 64, 16, 2, 3)),
        ((128, 128, 128, 16, 16), (True, 32, 8, 2, 8)),
    ],
)
def test_the_weights_blocks_are_those_that_were_measured(call: tuple[int, ...], cut: tuple[object, ...]) -> None:
    plan = spec.weight_plan(spec.Conv3x3(*call), 132)
    assert (plan.x_windowed, plan.columns, plan.rows, plan.wide, plan.stages) == cut


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"arch": 80}, "sm_80 lacks the products of warpgroups that sm_90 has"),
        ({"arch": 100}, "sm_100 lacks the products of warpgroups that sm_90 has"),
        ({"shape": (2, 64, 8)}, "3-D input"),
        ({"groups": 2}, "2 groups of 64 channels"),
        ({"weight_shape": (64, 64, 5, 5)}, "5 x 5 taps"),
        ({"stride": (2, 2)}, "stride 2 x 2"),
        ({"dilation": (2, 2)}, "dilation 2 x 2"),
        ({"padding": (0, 0)}, "padding 0 x 0"),
        ({"weight_shape": (48, 64, 3, 3)}, "64 channels to 48"),
        ({"shape": (2, 256, 8, 8), "weight_shape": (256, 256, 3, 3)}, "256 channels to 256"),
        ({"shape": (2, 256, 8, 8), "weight_shape": (64, 256, 3, 3)}, "256 channels to 64"),
        ({"shape": (2, 128, 8, 8), "weight_shape": (128, 128, 3, 3)}, ""),  # the weight's gradient alone
        ({"dtype": "float32"}, "dtype float32"),
        ({"weight_dtype": "float16"}, "weight dtype float16"),
        ({"channels_last": False}, "input is not channels_last"),
        ({"shape": (0, 64, 8, 8)}, "empty input"),
        ({"shape": (1, 64, 8192, 4096)}, "an image is beyond 32-bit offsets"),
    ],
)
def test_what_is_supported(changed: dict[str, object], reason: str) -> None:
    call = {
        "shape": (2, 64, 8, 8), "channels_last": True, "dtype": "bfloat16", "weight_shape": (64, 64, 3, 3),
        "weight_dtype": "float32", "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "arch": 90,
    }  # fmt: skip
    assert unsupported(spec, **{**call, **changed}) == reason


@pytest.mark.parametrize(
    ("call", "dtype", "wins"),
    [
        ((128, 64, 64, 32, 32), "bfloat16", True),
        ((256, 64, 64, 56, 56), "float16", True),
        ((128, 64, 64, 32, 32), "float32", False),
        ((1, 64, 64, 32, 32), "bfloat16", False),  # so few pixels were not measured
        ((512, 64, 64, 33, 17), "bfloat16", False),  # nor tiles that are a third filling
        ((32, 64, 128, 64, 64), "bfloat16", True),
        ((32, 32, 64, 64, 64), "bfloat16", False),
        ((32, 128, 128, 64, 64), "bfloat16", True),  # the weight's gradient alone
        ((32, 256, 128, 64, 64), "bfloat16", False),
    ],
)
def test_where_it_is_dispatched(call: tuple[int, ...], dtype: str, wins: bool) -> None:
    assert (spec.wins(spec.Conv3x3(*call), dtype) == "") == wins


@pytest.mark.parametrize(
    ("call", "wins"),
    [
        ((128, 64, 64, 32, 32), True),
        ((128, 128, 128, 16, 16), True),
        ((256, 128, 32, 14, 14), True),
        ((128, 64, 64, 16, 16), False),
        ((8, 64, 64, 56, 56), False),
    ],
)
def test_the_weights_sums_take_no_more_memory_than_the_inputs_gradient(call: tuple[int, ...], wins: bool) -> None:
    refusal = spec.weight_wins(spec.Conv3x3(*call))
    assert (refusal == "") == wins
    assert wins or "sums of 10 MB beside a gradient of" in refusal
    assert spec.product_wins(spec.Conv3x3(*call)) == "" or call[1] == call[2] == 128


def test_a_product_that_does_not_win_is_pytorchs(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 to 32 channels: the forward ours, the gradient of the input PyTorch's."""
    monkeypatch.setattr(spec, "ROOM", 1e9)
    at_any_size = replace(dispatch_table.read()["conv3x3"], sizes=())
    x, weight = nhwc(2, 128, 8, 8).bfloat16().requires_grad_(), torch.randn(32, 128, 3, 3, requires_grad=True)
    with only_what_wins(), dispatch_table.instead("conv3x3", at_any_size):
        y = api.conv3x3(x, weight)
        assert emulated.launches["conv3x3"] == 1
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert emulated.launches["conv3x3"] == 1
    (theirs,) = torch.autograd.grad(F.conv2d(x, weight.bfloat16(), None, 1, 1), x, torch.ones_like(y))
    assert torch.equal(dx, theirs)


def test_between_wide_sides_the_weights_gradient_alone_is_ours(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward and the gradient of the input are PyTorch's, and cast the weight once."""
    monkeypatch.setattr(spec, "ROOM", 1e9)
    at_any_size = replace(dispatch_table.read()["conv3x3"], sizes=())
    casts: list[torch.dtype] = []
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *a, **k: (casts.append(t.dtype), to(t, *a, **k))[1])
    x, weight = nhwc(2, 128, 8, 8).bfloat16().requires_grad_(), torch.randn(128, 128, 3, 3, requires_grad=True)
    with only_what_wins(), dispatch_table.instead("conv3x3", at_any_size):
        y = api.conv3x3(x, weight)
        assert not emulated.launches
        dx, dweight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert set(emulated.launches) == {"conv3x3_backward_weight", "conv3x3_backward_weight_sum"}
    assert casts.count(torch.float32) == 1
    plain = F.conv2d(x, weight.bfloat16(), None, 1, 1)
    theirs = torch.autograd.grad(plain, (x, weight), torch.ones_like(y))
    assert torch.equal(dx, theirs[0])
    assert float((dweight - theirs[1]).norm() / theirs[1].norm()) < 0.01


def test_where_its_forward_does_not_win_the_gradient_of_the_input_still_can(
    emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "ROOM", 1e9)
    of = dispatch_table.read()["conv3x3"]
    x, weight = nhwc(2, 64, 8, 8).bfloat16().requires_grad_(), torch.randn(128, 64, 3, 3)
    changed = replace(of, sizes=(), parts={"3x3 64 to 128": ("gradient",)})
    with only_what_wins(), dispatch_table.instead("conv3x3", changed):
        y = api.conv3x3(x, weight)
        assert torch.equal(y, F.conv2d(x, weight.bfloat16(), None, 1, 1))
        assert not emulated.launches["conv3x3"]
        y.sum().backward()
    assert emulated.launches["conv3x3"] == 1


def test_elsewhere_pytorchs_own_runs(emulated) -> None:
    x, weight = nhwc(1, 64, 5, 4), torch.randn(64, 64, 3, 3)
    assert torch.equal(api.conv3x3(x, weight), F.conv2d(x, weight, None, 1, 1))
    assert api.fell_back["dtype float32"]
    assert not emulated.launches


def test_under_autocast_the_weight_is_not_cast(emulated) -> None:
    x, weight = nhwc(1, 64, 4, 5).requires_grad_(), torch.randn(64, 64, 3, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = api.conv3x3(x, weight)
    assert y.dtype == torch.bfloat16
    dx, dweight = torch.autograd.grad(y.float().sum(), (x, weight))
    assert (dx.dtype, dweight.dtype) == (torch.float32, torch.float32)
    assert emulated.launches["conv3x3"] == 2
    assert emulated.launches["conv3x3_backward_weight_sum"] == 1


def test_only_sources_with_hoppers_products_are_compiled_for_hopper_alone() -> None:
    alone = {name for name in sources.all_names() if sources.target(name)}
    assert alone == {*spec.KERNELS, wide.CONVOLUTION, exact.HOPPER, exact.HOPPER_WEIGHT}
    assert sources.target(spec.CONV) == ("-arch=sm_90a",)


# What is changed in the kernel, and in which case the check must see it.
FAULTS = {
    "taps not turned": ("(8 - tap) * WEIGHT_LINES", "tap * WEIGHT_LINES", (3, 64, 9, 13)),
    "a halo of the other side": ("tile.column - 1, tile.row - 1", "tile.column, tile.row - 1", (3, 64, 9, 13)),
    "a tile read before it is there": ("      wait(full + stage, item / STAGES % 2);\n", "", (3, 64, 9, 13)),
    "a tile filled while it is read": ("        wait(empty + stage, parity);\n", "", (1, 64, 8, 33)),
    "weights read before they are there": ("  wait_for_part(1, 256);\n", "", (3, 64, 9, 13)),
    "sums read before they are made": ("      products_wait<0>();\n", "", (3, 64, 9, 13)),
    "sums of the tile before": ("chunk + tap + k);", "1);", (1, 64, 8, 33)),
    "stored before all warps have staged": (
        "      wait_for_part(2 + group, 128);\n#pragma unroll 4", "#pragma unroll 4", (3, 64, 9, 13),
    ),
    "staged where other warps still read": (
        "      wait_for_part(2 + group, 128);  // the other warps' products, and what they have stored of the band before\n", "",
        (3, 64, 9, 13),
    ),
    "the second chunk's weights": ("weights + chunk * WEIGHT_OUT * 128", "weights", (2, 128, 7, 9)),
    "the second chunk's pixels": ("chunk * 64, 0, tile.column", "0, 0, tile.column", (2, 128, 7, 9)),
    "the second band's weights": ("+ band * 64;", ";", (1, 64, 10, 5)),
    "a store beyond the image": ("if (row < height && column < width)", "if (true)", (1, 64, 10, 5)),
    "a row of taps for another": ("tile + tap_row * PITCH * LINE", "tile", (3, 64, 9, 13)),
    "a window's taps not turned": ("(2 - tap_row) * weight_row", "tap_row * weight_row", (2, 128, 7, 9)),
    "another job's channels": ("full + stage, first, group, window_column", "full + stage, 0, group, window_column", (3, 64, 9, 13)),
    "pixels of the weight read before they are there": ("    wait(full + stage, parity);\n", "", (3, 64, 9, 13)),
    "pixels of the weight overwritten": ("    products_wait<1>();  // those of the tile before are made\n", "", (3, 64, 9, 13)),
    "the last tile's products": ("  products_wait<0>();\n  // Of rows", "  // Of rows", (3, 64, 9, 13)),
    "a line of blocks that nobody adds up": ("for (int line = part;", "for (int line = part + 1;", (3, 64, 9, 13)),
    "added up before all have": ("  __syncthreads();\n  if (threadIdx.x >= 4", "  if (threadIdx.x >= 4", (3, 64, 9, 13)),
}  # fmt: skip


@pytest.mark.long
def test_few_stages_are_right_too_where_each_is_one_warpgroups(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the faults below are planted in."""
    emulated.use(sm_count=1)
    monkeypatch.setattr(spec, "COLUMNS", (64, 112))
    monkeypatch.setattr(spec, "STAGES", 2)
    spec.plan.cache_clear()
    try:
        for shape in ((3, 64, 9, 13), (1, 64, 8, 33)):
            case = next(c for c in cases.VERIFICATION if c.shape == shape and "bn" not in c.name)
            found = verify.check(FAMILY, case, "cpu")
            assert found["passed"], found["detail"]
    finally:
        spec.plan.cache_clear()


# Of a kind with others.
LONG = {
    *(
        "a halo of the other side",
        "sums of the tile before",
        "staged where other warps still read",
        "the second chunk's pixels",
    ),
    *("a row of taps for another", "another job's channels", "the last tile's products", "a store beyond the image"),
    *("stored before all warps have staged", "pixels of the weight read before they are there"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[pytest.mark.long] if fault in LONG else []) for fault in FAULTS]
)
def test_a_fault_planted_in_the_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after, shape = FAULTS[fault]
    emulated.use(sm_count=1)  # so that a block has more tiles than stages
    monkeypatch.setattr(spec, "COLUMNS", (64, 112))
    if shape in ((3, 64, 9, 13), (1, 64, 8, 33)):  # 64 channels to 64: a stage a warpgroup
        monkeypatch.setattr(spec, "STAGES", 2)
    monkeypatch.setattr(weight, "MAX_STAGES", 2)
    spec.plan.cache_clear()
    weight.plan.cache_clear()
    case = next(c for c in cases.VERIFICATION if c.shape == shape and "bn" not in c.name)
    try:
        assert not passes_with(monkeypatch, FAMILY, case, before, after)
    finally:
        spec.plan.cache_clear()
        weight.plan.cache_clear()


class Net(nn.Module):
    """3 x 3 convolutions between few channels as modules and as a function, beside ones that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.narrow = nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.grown = nn.Conv2d(64, 128, 3, padding="same", bias=False)
        self.biased = nn.Conv2d(128, 64, 3, padding=1)
        self.strided = nn.Conv2d(64, 64, 3, stride=2, padding=1, bias=False)
        self.odd = nn.Conv2d(64, 48, 3, padding=1, bias=False)
        self.taps = nn.Parameter(torch.randn(32, 128, 3, 3) / 34)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.grown(self.narrow(self.stem(x)))
        y = F.conv2d(x, self.taps, None, 1, 1).mean((2, 3))
        return torch.cat([y, self.odd(self.strided(self.biased(x))).mean((2, 3))], 1)


@pytest.mark.parametrize("compiled", [False, True])
def test_patterns_are_found_and_train_as_before(compiled: bool) -> None:
    torch.manual_seed(0)
    model, plain = Net().train(), Net().train()
    plain.load_state_dict(model.state_dict())
    report = match.MatchReport()
    x = torch.randn(2, 3, 9, 8)

    def backend(graph_module: torch.fx.GraphModule, inputs: object) -> object:
        FAMILY.rewrite(graph_module, report, compiled=compiled)
        graph_module.recompile()
        return graph_module.forward

    torch._dynamo.reset()
    with dispatch.everything(), torch.autocast("cpu", dtype=torch.bfloat16):
        run = torch.compile(model.forward, backend=backend, dynamic=False)
        ours, theirs = run(x), plain(x)
        ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    assert {path: name for path, name in report.matched.items() if "." not in path and "(" not in path} == {
        "narrow": "3x3 64 to 64",
        "grown": "3x3 64 to 128",
    }
    assert "3x3 128 to 32" in report.matched.values()
    assert report.unmatched == {"biased": "has a bias"}
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == other.grad.dtype
        assert float((mine.grad - other.grad).norm() / other.grad.norm()) < 0.05


def test_another_architecture_leaves_it_to_pytorch_and_verification_says_so(emulated) -> None:
    emulated.use(arch=80)
    row = verify.check(FAMILY, FAMILY.verification[0], "cpu")
    assert row["passed"] is None
    assert "sm_80 lacks the products of warpgroups" in str(row["detail"])
