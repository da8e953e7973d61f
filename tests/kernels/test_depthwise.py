"""Depthwise convolution without a GPU: definition, launch geometry, what is supported, emulated kernels, graph matching."""

from __future__ import annotations

import pytest
import torch
from emulation.compiler import EmulationError
from emulation.device import only_what_wins
from emulation.planted import passes_with, planted
from emulation.supports import unsupported
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dynamo, match, verify
from advisor.ops.depthwise import api, cases, cuda, reference, spec

FAMILY = catalog.get("depthwise")


def nhwc(*shape: int, seed: int = 0) -> torch.Tensor:
    n, c, h, w = shape
    return torch.randn(n, h, w, c, generator=torch.Generator().manual_seed(seed)).permute(0, 3, 1, 2)


@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 1, 1), (3, 2, 1), (5, 1, 2)])
def test_the_definition_is_pytorchs_and_passes_gradcheck(kernel: int, stride: int, dilation: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 6, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 1, kernel, kernel, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    padding = (kernel // 2 * dilation, kernel // 2)

    def definition(*tensors: torch.Tensor) -> torch.Tensor:
        return reference.depthwise_conv2d(*tensors, stride, padding, dilation)

    plain = F.conv2d(x, weight, bias, stride, padding, dilation, groups=2)
    torch.testing.assert_close(definition(x, weight, bias), plain)
    assert torch.autograd.gradcheck(definition, (x, weight, bias))


@given(
    batch=st.integers(1, 300),
    vectors=st.integers(1, 700),
    height=st.integers(1, 120),
    width=st.integers(1, 120),
    kernel=st.sampled_from(spec.TAPS),
    stride=st.integers(1, 2),
    wide=st.booleans(),
    sm_count=st.integers(1, 200),
)
def test_geometry_covers_every_pixel_and_channel(
    batch: int, vectors: int, height: int, width: int, kernel: int, stride: int, wide: bool, sm_count: int
) -> None:
    pad = kernel // 2
    call = spec.call((batch, vectors * spec.CHANNELS, height, width), kernel, stride, (pad, pad), 1)
    dtype = "float32" if wide else "bfloat16"
    plans = [
        (spec.forward_config(call, dtype, arch), spec.forward_geometry, call.out_height, call.out_width)
        for arch in (90, 100)
    ]
    plans.append((spec.weight_config(call, dtype), spec.weight_geometry, call.out_height, call.out_width))
    for config, geometry, rows, columns in plans:
        shape = geometry(call, config, sm_count)
        assert shape.vectors == vectors
        assert (shape.grid[1] - 1) * shape.tile < vectors <= shape.grid[1] * shape.tile
        assert shape.strips * config.strip >= columns
        assert (shape.segments - 1) * shape.segment_rows < rows <= shape.segments * shape.segment_rows
        assert shape.items == batch * shape.strips * shape.segments
        assert 1 <= shape.tile <= config.threads
        assert max(shape.grid[1:]) <= 65535


@given(
    batch=st.integers(1, 300),
    channels=st.integers(1, 700).map(lambda n: 2 * n),
    height=st.integers(1, 120),
    width=st.integers(1, 120),
    form=st.sampled_from(sorted(spec.STRIP_RINGS)),
    pad=st.integers(0, 6),
    backward=st.booleans(),
)
def test_rings_cover_every_pixel_and_channel_and_fit_in_shared_memory(
    batch: int, channels: int, height: int, width: int, form: tuple[int, int, bool], pad: int, backward: bool
) -> None:
    kernel, stride, wide = form
    if backward and form not in spec.BACKWARD_RINGS:
        return
    call = spec.call((batch, channels, height, width), kernel, stride, (min(pad, kernel - 1),) * 2, 1)
    if call.out_height < 1 or call.out_width < 1:
        return
    dtype = "float32" if wide else "bfloat16"
    ring = (spec.backward_ring if backward else spec.strips_ring)(call, dtype)
    shape = spec.ring_geometry(call, ring, dtype, 132, backward=backward)
    assert spec.ring_bytes(ring, call, dtype, backward=backward) <= spec.SHARED_BYTES
    assert ring.depth >= 2
    assert shape.vectors * ring.channels == channels
    assert (shape.grid[1] - 1) * shape.tile < shape.vectors <= shape.grid[1] * shape.tile
    assert shape.tile <= min(ring.threads, ring.tile // ring.channels)
    rows, columns, step = call.out_height, call.out_width, 1
    if backward:  # a step's rows begin at even rows of the padded image, its columns at even ones of the image
        rows, columns, step = height + call.padding[0] % stride, width, stride
    assert step * shape.strips * ring.strip >= columns
    assert step * shape.segments * shape.segment_rows >= rows
    assert (shape.segments - 1) * shape.segment_rows < rows
    assert shape.items == batch * shape.strips * shape.segments


@pytest.mark.parametrize(("channels", "bytes_of_vector"), [(58, 4), (72, 4), (144, 8), (200, 4), (960, 8)])
def test_a_tile_fills_the_sectors_that_it_touches(channels: int, bytes_of_vector: int) -> None:
    """A tile of one vector leaves no thread idle and moves eight times the bytes."""
    vectors = channels * 2 // bytes_of_vector
    tile = spec.tile_of(vectors, 128, 64, bytes_of_vector)
    assert tile * bytes_of_vector >= 96
    assert 128 // tile * tile >= 96


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"arch": 75}, "older"),
        ({"arch": 100}, ""),
        ({"arch": 100, "dtype": "float32", "weight_shape": (64, 1, 15, 15), "padding": (7, 7)}, "too few registers"),
        ({"dtype": "float64"}, "dtype"),
        ({"weight_dtype": "float64"}, "weight dtype"),
        ({"channels_last": False}, "channels_last"),
        ({"shape": (2, 63, 8, 8), "weight_shape": (63, 1, 3, 3), "groups": 63}, "no multiple"),
        ({"groups": 32}, "not depthwise"),
        ({"weight_shape": (128, 1, 3, 3)}, "several outputs"),
        ({"weight_shape": (64, 1, 3, 5)}, "not square"),
        ({"weight_shape": (64, 1, 4, 4)}, "4 x 4 taps"),
        ({"weight_shape": (64, 1, 17, 17)}, "17 x 17 taps"),
        ({"stride": (3, 3)}, "stride"),
        ({"stride": (2, 1)}, "stride"),
        ({"stride": (2, 2), "dilation": (2, 2)}, "stride and dilation"),
        ({"padding": (3, 0)}, "wider"),
        ({"shape": (0, 64, 8, 8)}, "empty"),
    ],
)
def test_unsupported_says_why(change: dict, reason: str) -> None:
    call = {
        "shape": (2, 64, 8, 8),
        "channels_last": True,
        "dtype": "bfloat16",
        "weight_shape": (64, 1, 3, 3),
        "weight_dtype": "float32",
        "stride": (1, 1),
        "padding": (1, 1),
        "dilation": (1, 1),
        "groups": 64,
        "arch": 90,
    }
    answer = unsupported(spec, **{**call, **change})
    assert reason in answer if reason else answer == ""


def test_what_is_not_measured_is_not_dispatched(emulated) -> None:
    assert not FAMILY.not_dispatched()
    for channels, kernel, stride, dilation, image, refusal in (
        (64, 9, 1, 1, 7, ""),
        (64, 9, 2, 1, 7, dispatch.UNMEASURED),
        (64, 7, 2, 1, 7, dispatch.UNMEASURED),
        (64, 11, 1, 1, 14, dispatch.UNMEASURED),
        (58, 3, 1, 1, 14, ""),
        (58, 3, 2, 1, 14, dispatch.UNMEASURED),
        (64, 3, 1, 12, 13, ""),
        (64, 3, 1, 12, 12, dispatch.UNMEASURED),  # taps outside the image
        (64, 3, 1, 13, 64, dispatch.UNMEASURED),  # no network's
        (64, 3, 2, 2, 64, dispatch.UNMEASURED),
        (64, 5, 1, 2, 64, dispatch.UNMEASURED),
        (58, 3, 1, 2, 64, dispatch.UNMEASURED),
    ):
        call = {"channels": channels, "kernel": kernel, "stride": stride, "dilation": dilation, "image": image}
        assert spec.wins(**call) == refusal, call
    before = sum(api.fell_back.values())
    emulated.launches.clear()
    x, weight = nhwc(1, 4, 9, 9), torch.randn(4, 1, 9, 9)
    with only_what_wins():
        y = api.depthwise_conv2d(x, weight, None, 1, (4, 4))
    torch.testing.assert_close(y, F.conv2d(x, weight, None, 1, 4, groups=4))
    assert not emulated.launches
    assert sum(api.fell_back.values()) == before + 1


@pytest.mark.parametrize(
    ("kernel", "stride", "side", "dtype", "passes"),
    [
        (3, 1, 56, "bfloat16", ""),
        (5, 2, 56, "bfloat16", ""),
        (7, 1, 28, "bfloat16", "forward data weight"),
        (7, 1, 14, "bfloat16", "forward data weight"),
        (7, 1, 7, "bfloat16", "weight"),
        (7, 1, 56, "float16", "forward data weight"),
        (7, 1, 56, "float32", ""),
        (7, 2, 56, "bfloat16", ""),
        (9, 1, 56, "bfloat16", ""),
    ],
)
def test_tensor_cores_take_what_they_measured_faster(
    kernel: int, stride: int, side: int, dtype: str, passes: str
) -> None:
    call = spec.call((4, 96, side, side), kernel, stride, (kernel // 2, kernel // 2), 1)
    taken = [kind for kind in ("forward", "data", "weight") if spec.banded(call, dtype, kind)]
    assert taken == passes.split()
    ran = spec.sources(call, dtype)
    assert (spec.BAND in ran[0], spec.BAND_WEIGHT in ran[1]) == ("forward" in taken, "weight" in taken)


@pytest.mark.parametrize(
    ("channels", "side", "channels_of_thread", "strip"), [(144, 56, 4, 4), (960, 7, 2, 7), (58, 28, 2, 7)]
)
def test_a_ring_suits_the_call(channels: int, side: int, channels_of_thread: int, strip: int) -> None:
    ring = spec.strips_ring(spec.call((4, channels, side, side), 3, 1, (1, 1), 1), "bfloat16")
    assert (ring.channels, ring.strip) == (channels_of_thread, strip)


@given(
    batch=st.integers(1, 300),
    channels=st.integers(1, 700).map(lambda n: 2 * n),
    height=st.integers(1, 120),
    width=st.integers(1, 120),
    pad=st.integers(0, 6),
    weight=st.booleans(),
)
def test_bands_cover_every_pixel_and_channel(
    batch: int, channels: int, height: int, width: int, pad: int, weight: bool
) -> None:
    kernel = spec.BAND_TAPS
    call = spec.call((batch, channels, height, width), kernel, 1, (pad, pad), 1)
    if call.out_height < 1 or call.out_width < 1:
        return
    plan = spec.band(call, weight=weight)
    shape = spec.band_geometry(call, plan, 132)
    cut, block = plan.layout, plan.block
    assert cut.column_tiles * cut.strips * cut.pixels >= call.out_width
    assert 1 <= cut.pixels <= 8
    assert 1 <= cut.window <= 16
    # The first and the last pixel of a strip find all their taps that meet the image in its window.
    for n in (0, cut.pixels - 1):
        for s in range(kernel):
            j = n + s - cut.lead
            if cut.column_tiles * cut.strips > 1 or 0 <= cut.origin + j < call.width:
                assert 0 <= j < cut.window
    assert shape.grid[1] * block.tile >= channels > (shape.grid[1] - 1) * block.tile
    assert block.tile % (block.copy // 2) == 0
    assert (2 * channels) % block.copy == 0
    assert block.threads <= 1024
    assert shape.items == shape.groups * shape.column_tiles * shape.segments
    assert shape.groups * 16 // cut.strips >= batch


# What is changed in a kernel, and in which case the check must see it.
FAULTS = {
    "no bias": ("bias ? widen_weight(bias[t.vector * CH + j]) : 0.f", "0.f", "depthwise k3 s1 d2 bias", "float32"),
    "a column too far": ("at >= 0 && at < width", "at >= 0 && at < width - 1", "depthwise k3 s1 d2 bias", "float32"),
    "last rows lost": ("if (done >= begin && done < end) put(sum[q], to);", "", "depthwise k3 s1 d2 bias", "float32"),
    "no bias from the strips": ("BIAS && (!MOMENTS", "false && (!MOMENTS", "depthwise k3 s1 bias", "float32"),
    "the strips' last rows lost": ("if (done < end) put(sum[q]);", "", "depthwise k3 s1 bias", "float32"),
    "a column of the ring too far": (
        "< (unsigned int)width",
        "<= (unsigned int)width",
        "depthwise k3 s1 bias",
        "float32",
    ),
    "a row above the image read": ("(row + e >= 0 && row + e < height)", "true", "depthwise k3 s2", "float32"),
    "the ring read too early": ("cp_async_wait<DEPTH - 2>();", "", "depthwise k3 s1 bias", "float32"),
    "a strip's bias counted twice": ("v >= LEFT || v >= (owned & 255)", "true", "depthwise k3 s1 bias", "float32"),
    "dy below the image": (
        "if ((unsigned int)(a + u) < (unsigned int)out_height)",
        "if (true)",
        "depthwise k3 s1 bias",
        "float32",
    ),
    "columns of the wrong parity": ("(v + PHASE) / UP - i", "v / UP - i", "depthwise k3 s2", "bfloat16"),
    "no bias from the tensor cores": ("total += mine[lane * 8 + n];", "", "depthwise k7 s1 bias", "bfloat16"),
    "a band one pixel off": (
        "s = j + lead - g;",
        "s = j + 1 + lead - g;",
        "depthwise k7 s1 bias",
        "bfloat16",
    ),
    "an infinity spreads over its strip": ("if (found != 0u)", "if (false)", "depthwise k7 s1 bias", "bfloat16"),
    "a stage filled too early": ("cp_async_wait<STAGES - 2>();", "", "depthwise k7 s1 bias", "bfloat16"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_a_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after, name, dtype = FAULTS[fault]
    found = [c for c in cases.VERIFICATION if c.name == name and c.dtype == dtype]
    case = max(found, key=lambda c: c.shape[-1])  # the tensor cores take wide rows
    assert not passes_with(monkeypatch, FAMILY, case, before, after)


BAND_PARTS = [(batch, height, sm_count) for batch, sm_count in ((1, 1), (1, 3), (9, 1)) for height in (1, 2, 5, 8, 9)]


def _bands_agree(emulated, batch: int, height: int, sm_count: int) -> bool:
    """Whether forward and data gradient on the tensor cores are right, without a segment's or an item's edge lost."""
    emulated.use(sm_count=sm_count)
    call = spec.call((batch, 10, height, 30), 7, 1, (3, 3), 1)
    x, weight, bias = nhwc(batch, 10, height, 30).bfloat16(), torch.randn(10, 1, 7, 7), torch.randn(10)
    rounded = weight.bfloat16().double()
    y, _ = cuda.forward(x, weight, bias, call)
    dx = cuda.backward_data(x, weight, call)
    expected = F.conv2d(x.double(), rounded, bias.double(), padding=3, groups=10)
    gradient = F.conv_transpose2d(x.double(), rounded, padding=3, groups=10)
    return all(
        torch.allclose(mine.double(), theirs, rtol=0.01, atol=0.01) for mine, theirs in ((y, expected), (dx, gradient))
    )


def test_bands_end_at_any_row(emulated) -> None:
    """Steps take two rows: segments and images of odd and even many rows, and several items a block."""
    kinds = set()
    for batch, height, sm_count in BAND_PARTS:
        call = spec.call((batch, 10, height, 30), 7, 1, (3, 3), 1)
        assert spec.banded(call, "bfloat16", "forward")
        shape = spec.band_geometry(call, spec.band(call, weight=False), sm_count)
        kinds.add((shape.segment_rows % 2, shape.segments > 1, shape.items > shape.grid[0]))
        assert _bands_agree(emulated, batch, height, sm_count), (batch, height, sm_count)
    for odd in (0, 1):
        assert (odd, True, False) in kinds
        assert (odd, False, True) in kinds
    assert emulated.launches["depthwise_band"] == 2 * len(BAND_PARTS)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("while (row < part.end)", "while (row + 1 < part.end)"),
        ("row_ahead < end_ahead) return;", "row_ahead <= end_ahead) return;"),
        ("row - ROWS + b < part.end", "true"),
        ("row_ahead + b < height", "true"),
    ],
    ids=["the odd row lost", "a step too many copied", "a row beyond a segment written", "a row below the image read"],
)
def test_a_band_that_ends_at_a_wrong_row_is_found(
    emulated, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    with planted(monkeypatch, before, after):
        try:
            right = all(_bands_agree(emulated, *part) for part in BAND_PARTS)
        except EmulationError:
            right = False
    assert not right


class Net(nn.Module):
    """Depthwise convolutions as modules and as functions, beside ones that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 8, 1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.same = nn.Conv2d(8, 8, 5, padding="same", groups=8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.several = nn.Conv2d(8, 16, 3, padding=1, groups=8)
        self.taps = nn.Parameter(torch.randn(16, 1, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.several(self.grouped(self.same(self.depth(self.expand(x)))))
        return F.conv2d(x, self.taps, None, 2, 1, 1, 16).mean((2, 3))


def test_patterns_are_found_and_train_as_before() -> None:
    torch.manual_seed(0)
    model, plain = Net().train(), Net().train()
    plain.load_state_dict(model.state_dict())
    report = match.MatchReport()
    x = torch.randn(2, 3, 9, 8)
    with dispatch.everything():
        run = torch.compile(model.forward, backend=dynamo.backend({"depthwise": report}, mode=None), dynamic=False)
        ours, theirs = run(x), plain(x)
        ours.square().sum().backward()
    theirs.square().sum().backward()
    assert {path: name for path, name in report.matched.items() if path in ("depth", "same")} == {
        "depth": "depthwise k3 s1",
        "same": "depthwise k5 s1",
    }
    assert "depthwise k3 s2" in report.matched.values()
    assert set(report.unmatched) == {"several"}
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.long
@pytest.mark.parametrize(
    "label",
    [
        "k5 s1 bias float32",
        "k5 s2 float32",
        "k7 s1 bias float16",
        "k7 s2 bfloat16",
        "k11 s2 bfloat16",
        "k13 s1 bias bfloat16",
    ],
)
def test_strips_of_sm_100_are_right(emulated, monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    monkeypatch.setattr(spec, "ringed", lambda *_: False)  # the general kernels, which have the other strips
    monkeypatch.setattr(spec, "banded", lambda *_: False)
    emulated.use(arch=100)
    case = next(c for c in cases.VERIFICATION if c.label.startswith(f"depthwise {label}"))
    row = verify.check(FAMILY, case, "cpu")
    assert row["passed"], row["detail"]
