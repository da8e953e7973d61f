"""Upsampling without a GPU: definition, launch geometry, what is supported, emulated kernels, graph matching."""

from __future__ import annotations

import pytest
import torch
from emulation.planted import passes_with
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, match, nvrtc
from advisor.ops.upsample import api, cases, cuda, reference, spec

FAMILY = catalog.get("upsample")
# mode, align_corners, input, output, factors
RESIZES = [
    ("bilinear", False, (5, 7), (10, 14), (2.0, 2.0)),
    ("bilinear", True, (5, 7), (10, 14), None),
    ("bilinear", False, (4, 5), (10, 15), (2.5, 3.0)),
    ("bilinear", False, (4, 5), (9, 13), (2.3, 2.6)),
    ("bilinear", True, (9, 8), (4, 1), None),
    ("bilinear", False, (1, 1), (3, 2), None),
    ("nearest", False, (5, 4), (10, 12), (2.0, 3.0)),
    ("nearest", False, (5, 4), (13, 3), None),
    ("nearest-exact", False, (5, 4), (13, 3), None),
]


def nhwc(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    n, c, h, w = shape
    values = torch.randn(n, h, w, c, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).permute(0, 3, 1, 2)


@pytest.mark.parametrize(("mode", "align", "before", "after", "factors"), RESIZES)
def test_the_definition_is_pytorchs(mode, align, before, after, factors) -> None:
    x = nhwc(2, 3, *before)
    want = F.interpolate(x, None if factors else after, factors, mode, align if mode == "bilinear" else None)
    torch.testing.assert_close(reference.upsample_concat([x], 0, after, factors, mode, align), want)


def test_the_definition_passes_gradcheck() -> None:
    x, skip = nhwc(1, 2, 3, 4).double().requires_grad_(), nhwc(1, 3, 5, 8).double().requires_grad_()

    def f(x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return reference.upsample_concat([skip, x], 1, (5, 8), None, "bilinear", True)

    assert torch.autograd.gradcheck(f, (x, skip))


@pytest.mark.parametrize(("mode", "align", "before", "after", "factors"), RESIZES)
def test_taps_are_as_many_outputs_as_a_column_goes_into(mode, align, before, after, factors) -> None:
    _, columns = spec.axes(*before, after, factors, align_corners=align)
    weights = reference.weights(columns, mode, align, torch.empty(0))
    assert spec.taps(columns, mode, align_corners=align) >= (weights != 0).sum(0).max()


def test_taps_of_twice_the_size_are_no_more_than_needed() -> None:
    for align, most in ((False, 4), (True, 5)):
        for size in (16, 32, 64, 128):
            _, columns = spec.axes(size, size, (2 * size, 2 * size), None, align_corners=align)
            assert spec.taps(columns, "bilinear", align_corners=align) <= most


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 400), st.sampled_from([2, 4, 8]))
def test_launches_cover_all_work_once(vectors: int, columns: int, rows: int, strip: int) -> None:
    shape = spec.geometry(vectors, columns, rows, strip)
    tile, across, down = shape.block
    assert tile * across * down <= spec.THREADS
    assert (shape.channel_tiles - 1) * tile < vectors <= shape.channel_tiles * tile
    assert (shape.column_tiles - 1) * across < columns <= shape.column_tiles * across
    assert (shape.row_tiles - 1) * down * strip < rows <= shape.row_tiles * down * strip + strip - 1
    copy = spec.copy_geometry(vectors, columns * rows)
    tile, across, _ = copy.block
    each = across * spec.COPY_PIXELS
    assert (copy.column_tiles - 1) * each < columns * rows <= copy.column_tiles * each


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"mode": "bicubic"}, "mode bicubic"),
        ({"dtype": "float64"}, "dtype"),
        ({"channels_last": False}, "channels_last"),
        ({"shape": (2, 12, 8, 8)}, "no multiple of 8"),
        ({"others": ((2, 12, 16, 16),)}, "12 concatenated channels"),
        ({"others": ((2, 16, 15, 16),)}, "differ in size"),
        ({"size": (160, 160)}, "more than 16"),
        ({"size": (16, 2**29)}, "2^31"),
    ],
)
def test_unsupported_calls_are_named(change: dict, reason: str) -> None:
    call = {
        "shape": (2, 16, 8, 8),
        "others": ((2, 24, 16, 16),),
        "size": (16, 16),
        "factors": None,
        "mode": "bilinear",
        "align_corners": False,
        "channels_last": True,
        "dtype": "bfloat16",
        "arch": 90,
    }
    merged = {**call, **change}
    if "size" in change:
        merged["others"] = ()
    answer = spec.unsupported(**merged)
    assert reason in answer if reason else answer == ""


def test_nothing_is_dispatched_without_a_measurement(monkeypatch: pytest.MonkeyPatch, unmeasured: None) -> None:
    monkeypatch.setattr(nvrtc, "on_device", lambda tensor: "")
    monkeypatch.setattr(nvrtc, "arch", lambda device: 90)
    dispatch.clear()
    assert api.upsample_concat([nhwc(1, 8, 2, 2)], 0, (4, 4), None, "bilinear").shape == (1, 8, 4, 4)
    assert FAMILY.fell_back == {dispatch.UNMEASURED: 1}


def test_nearest_copies_bits(emulated) -> None:
    x = nhwc(2, 16, 5, 3, dtype=torch.bfloat16)
    x[0, 0, 0, 0], x[0, 1, 0, 0] = torch.nan, torch.inf
    y = cuda.forward([x], 0, cuda.Resize(size=(10, 6), factors=(2.0, 2.0), mode="nearest", align_corners=False))
    want = F.interpolate(x, scale_factor=2)
    assert torch.equal(y.contiguous().view(torch.int16), want.contiguous().view(torch.int16))


def test_the_gradient_of_what_is_copied_is_a_view(emulated) -> None:
    with dispatch.everything():
        x, skip = nhwc(2, 16, 5, 3).requires_grad_(), nhwc(2, 8, 10, 6).requires_grad_()
        y = api.upsample_concat([skip, x], 1, (10, 6), None, "nearest")
        dy = nhwc(2, 24, 10, 6, seed=1)
        _, dskip = torch.autograd.grad(y, (x, skip), dy)
    assert torch.equal(dskip, dy[:, :8])
    assert dskip.untyped_storage().data_ptr() == dy.untyped_storage().data_ptr()


@pytest.mark.parametrize(("mode", "align"), [("bilinear", False), ("bilinear", True), ("nearest", False)])
def test_second_derivatives(emulated, mode: str, align: bool) -> None:
    def plain(x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return torch.cat([skip, F.interpolate(x, (10, 14), None, mode, align if mode == "bilinear" else None)], 1)

    def ours(x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return api.upsample_concat([skip, x], 1, (10, 14), None, mode, align)

    found = []
    with dispatch.everything():
        for function in (ours, plain):
            leaves = nhwc(2, 16, 5, 7).requires_grad_(), nhwc(2, 8, 10, 14, seed=1).requires_grad_()
            first = torch.autograd.grad(function(*leaves).pow(3).sum(), leaves, create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_the_operation_of_the_library(emulated) -> None:
    x, skip = nhwc(2, 24, 5, 7).requires_grad_(), nhwc(2, 16, 10, 14, seed=1).requires_grad_()
    arguments = ([skip, x], 1, [10, 14], [2.0, 2.0], "bilinear", False)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.advisor.upsample_concat.default, arguments, test_utils=tests)
    with dispatch.everything():
        library = torch.ops.advisor.upsample_concat(*arguments)
        function = api.upsample_concat([skip, x], 1, (10, 14), (2.0, 2.0), "bilinear", False)
    assert torch.equal(library, function)
    for mine, other in zip(
        *(torch.autograd.grad(y.square().sum(), (x, skip)) for y in (library, function)), strict=True
    ):
        assert torch.equal(mine, other)


# What is changed in a kernel, and in which case the check must see it.
FAULTS = {
    "neighbour's row": ("sh.index == have + 1", "sh.index >= have + 1", "bilinear to 4x5"),
    "no second row": ("s.weight * row[c];\n    }", "0.f * row[c];\n    }", "bilinear to 22x14+cat16"),
    "strip's first row": ("first - BILINEAR", "first", "bilinear to 22x14+cat16"),
    "a tap too few": ("taps = t + 1", "taps = t", "bilinear to 22x14+cat16"),
    "another slice": ("* out_width + ow) * y_vectors", "* out_width + ow) * vectors", "bilinear to 22x14+cat16"),
    "half a pixel": ("HALF_PIXEL ? 0.5f : 0.f)) * scale", "HALF_PIXEL ? 0.f : 0.f)) * scale", "nearest-exact to 13x9"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_a_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after, name = FAULTS[fault]
    case = next(c for c in cases.VERIFICATION if c.name == name and c.dtype == "bfloat16")
    assert not passes_with(monkeypatch, FAMILY, case, before, after)


class Decoder(nn.Module):
    """Two levels of a UNet as people write them, and interpolations that must be left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv1, self.conv2 = nn.Conv2d(24, 16, 3, padding=1), nn.Conv2d(32, 8, 1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.pad(self.up(x), [0, 0, 0, 0])
        y = self.conv1(torch.cat([skip, y], dim=1))
        y = self.conv2(torch.cat((F.interpolate(y, size=first.shape[2:]), first), 1))
        cubic = F.interpolate(x, scale_factor=2, mode="bicubic")
        twice = F.interpolate(x, scale_factor=2.0, mode="bilinear")  # used twice: the concatenation stays
        return y, cubic, torch.cat([twice, skip], 1), twice.mean()


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(nhwc(2, *size, seed=i, dtype=dtype) for i, size in enumerate(((16, 3, 4), (8, 6, 8), (16, 12, 16))))


def _capture(model: nn.Module) -> tuple[match.MatchReport, object]:
    report = match.MatchReport()
    return report, torch.compile(model.forward, backend=match.backend({FAMILY.id: report}, mode=None), dynamic=False)


def test_interpolations_are_found_with_the_concatenation() -> None:
    torch.manual_seed(0)
    model = Decoder()
    report, run = _capture(model)
    with dispatch.everything():
        got = run(*_inputs())
    assert report.matched.pop("up") == "bilinear+cat"
    assert sorted(report.matched.values()) == ["bilinear", "nearest+cat"]
    assert list(report.unmatched.values()) == ["mode bicubic"]
    for mine, plain in zip(got, model(*_inputs()), strict=True):
        torch.testing.assert_close(mine, plain)


def test_interpolations_are_left_alone_without_a_measurement(unmeasured: None) -> None:
    report, run = _capture(Decoder())
    run(*_inputs())
    assert not report.matched
    assert set(report.unmatched.values()) == {dispatch.UNMEASURED, "mode bicubic"}


def test_an_input_that_is_changed_in_place_is_left_alone() -> None:
    class Hazard(nn.Module):
        def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
            y = F.interpolate(x, scale_factor=2)
            x.add_(1.0)
            return torch.cat([y, skip], 1)

    report, run = _capture(Hazard())
    x, skip, _ = _inputs()
    with dispatch.everything():
        got = run(x.clone(), skip)
    assert list(report.unmatched.values()) == ["its input is changed in place elsewhere"]
    torch.testing.assert_close(got, torch.cat([F.interpolate(x, scale_factor=2), skip], 1))


class Level(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(24, 16, 3, padding=1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.cat([skip, F.interpolate(x, scale_factor=2, mode="bilinear")], 1))


@pytest.mark.parametrize("used_elsewhere", [False, True])
def test_an_fp32_result_under_autocast_is_rounded_where_only_convolutions_read_it(used_elsewhere: bool) -> None:
    """What autocast on CUDA captures: bf16 in, fp32 interpolation and concatenation, bf16 convolution."""
    graph = torch.fx.Graph()

    def node(made: torch.fx.Node, shape: tuple[int, ...], dtype: torch.dtype) -> torch.fx.Node:
        made.meta["example_value"] = torch.empty(shape, dtype=dtype, device="meta")
        return made

    low, wide = torch.bfloat16, torch.float32
    x = node(graph.placeholder("x"), (2, 16, 3, 4), low)
    skip = node(graph.placeholder("skip"), (2, 8, 6, 8), low)
    weight = node(graph.placeholder("weight"), (8, 24, 3, 3), wide)
    up = node(graph.call_function(F.interpolate, (x, None, 2.0, "bilinear", True)), (2, 16, 6, 8), wide)
    both = node(graph.call_function(torch.cat, ([skip, up], 1)), (2, 24, 6, 8), wide)
    y = node(graph.call_function(torch.conv2d, (both, weight)), (2, 8, 4, 6), low)
    graph.output((y, graph.call_method("mean", (both,))) if used_elsewhere else y)
    module = torch.fx.GraphModule(nn.Module(), graph)
    report = match.MatchReport()
    with dispatch.everything():
        FAMILY.rewrite(module, report, compiled=False)
    if used_elsewhere:
        assert not report.matched
        assert list(report.unmatched.values()) == ["its fp32 result is used by mean, which is no convolution"]
        return
    assert report.matched == {"interpolate": "bilinear+cat"}
    (put,) = (n for n in graph.nodes if n.target is api.upsample_concat)
    assert put.args == ([skip, x], 1, (6, 8), (2.0, 2.0), "bilinear", True)
    assert put.meta["example_value"].dtype == low
    assert F.interpolate not in {n.target for n in graph.nodes}
    assert torch.cat not in {n.target for n in graph.nodes}


def test_a_rounded_result_is_what_the_convolution_would_have_rounded(emulated) -> None:
    x, skip, _ = _inputs(torch.bfloat16)
    with dispatch.everything():
        got = api.upsample_concat([skip, x], 1, (6, 8), (2.0, 2.0), "bilinear", False)
    wide = torch.cat([skip, F.interpolate(x.float(), scale_factor=2, mode="bilinear")], 1)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wide.bfloat16())


def test_a_captured_model_trains_on_the_kernels_as_the_plain_one(emulated) -> None:
    torch.manual_seed(0)
    model, plain = Level().to(memory_format=torch.channels_last), Level().double()
    plain.load_state_dict(model.state_dict())
    x, skip, _ = _inputs()
    leaves, wide = ([t.to(kind, copy=True).requires_grad_() for t in (x, skip)] for kind in (x.dtype, torch.float64))
    with dispatch.everything():
        _, run = _capture(model)
        run(*leaves).square().sum().backward()
    plain(*wide).square().sum().backward()
    assert emulated.launches == {"upsample_forward": 1, "concat_copy": 1, "upsample_backward": 1}
    for mine, other in zip((*model.parameters(), *leaves), (*plain.parameters(), *wide), strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-4, atol=1e-4)
