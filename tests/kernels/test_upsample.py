"""Upsampling without a GPU: definition, launch geometry, what is supported, emulated kernels, graph matching."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from emulation.planted import passes_with
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dynamo, match, nvrtc
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
        ({"mode": "nearest-exact", "size": (80, 80)}, ""),
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


def _first_outputs(mode: str, size: int, out_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where first_output of kernels/include/resample.cuh begins to look for each pixel's first output, and where that lies."""
    corners = mode == "bilinear corners"
    line = spec.axis(size, out_size, None, align_corners=corners)
    half = 0.5 if mode in ("bilinear", "nearest-exact") else 0.0
    at = (torch.arange(out_size).float() + half) * line.scale - (half if mode == "bilinear" else 0.0)
    begin = (torch.arange(size).float() + (half if mode == "bilinear" else 0.0)) * line.inverse - 2.0
    sources = at.floor().clamp(min=0, max=size - 1)
    return begin.clamp(min=0).int(), torch.searchsorted(sources, torch.arange(size).float())


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bilinear corners"])
@given(size=st.integers(1, 2000), factor=st.floats(1, 100))
def test_the_backward_begins_with_a_pixels_first_output(mode: str, size: int, factor: float) -> None:
    begin, first = _first_outputs(mode, size, int(size * factor))
    # Bilinear's outputs before the first pixel's centre take that pixel alone: the next one's backward has no use for them.
    known = slice(1 if mode == "bilinear" else 0, None)
    assert bool((begin[known] <= first[known]).all())


@pytest.mark.parametrize("size", [(1, 6), (6, 1), (2, 12), (4, 4)], ids=str)
def test_no_gradient_of_nearest_exact_is_lost(emulated, size: tuple[int, int]) -> None:
    case = cases.case_of((1, 8, 1, 1), "float32", "nearest-exact", size=size)
    x, dy = torch.ones(1, 8, 1, 1, requires_grad=True), torch.ones(1, 8, *size)
    (dx,) = torch.autograd.grad(case.ours(x.to(memory_format=torch.channels_last)), x, dy)
    assert dx.flatten().tolist() == [size[0] * size[1]] * 8


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
    "a first output too late": (
        "(BILINEAR && HALF_PIXEL ? 0.5f : 0.f)) * inverse",
        "4.f) * inverse",
        "nearest-exact to 13x9",
    ),
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
    return report, torch.compile(model.forward, backend=dynamo.backend({FAMILY.id: report}, mode=None), dynamic=False)


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


LOW = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.fixture
def unet(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The example's, of 8 channels at the top."""
    path = Path(__file__).parents[2] / "docs" / "examples" / "unet.py"
    example = importlib.util.spec_from_file_location("unet_example", path)
    assert example is not None
    assert example.loader is not None
    module = importlib.util.module_from_spec(example)
    monkeypatch.setitem(sys.modules, "unet_example", module)
    example.loader.exec_module(module)
    torch.manual_seed(0)
    return module.UNet(width=8).to(memory_format=torch.channels_last)


def _autocast(low: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if low is None else torch.autocast("cpu", low)


def test_the_policy_is_that_of_cuda(cuda_autocast) -> None:
    x = nhwc(1, 8, 2, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert {F.interpolate(x, scale_factor=2, mode=mode).dtype for mode in spec.MODES} == {torch.float32}
        y = F.interpolate(x, size=(3, 5), mode="bilinear", align_corners=True)
    assert y.dtype == torch.float32
    assert F.interpolate(x, scale_factor=2).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "low",
    [
        pytest.param(None, id="fp32", marks=pytest.mark.long),
        pytest.param(torch.bfloat16, id="bf16"),
        pytest.param(torch.float16, id="fp16", marks=pytest.mark.long),
    ],
)
def test_all_upsamplings_of_the_unet_are_found(cuda_autocast, unet: nn.Module, low: torch.dtype | None) -> None:
    report, run = _capture(unet)
    x = nhwc(2, 3, 32, 32)
    with dispatch.everything(), _autocast(low), torch.no_grad():
        got = run(x)
    assert report.matched == {f"up{level}": "bilinear+cat" for level in (1, 2, 3, 4)}
    assert not report.unmatched
    with _autocast(low), torch.no_grad():
        want = unet(x)
    assert got.dtype == (low or torch.float32)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def _gradients(run: object, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    run(x).double().square().mean().backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def test_the_unet_trains_on_the_kernels_as_near_to_fp64_as_without_them(cuda_autocast, emulated, unet) -> None:
    plain, wide = copy.deepcopy(unet), copy.deepcopy(unet).double()
    report, run = _capture(unet)
    x = nhwc(2, 3, 32, 32)
    with torch.autocast(
        "cpu", torch.float16
    ):  # in bf16 eighteen batch norms over few pixels leave 40 % error, kernels or not
        mine, other = _gradients(run, unet, x), _gradients(plain, plain, x)
    want = _gradients(wide, wide, x.double())
    assert len(report.matched) == 4
    assert emulated.launches == {"upsample_forward": 4, "concat_copy": 4, "upsample_backward": 4}
    assert (mine - want).norm() < 1.5 * (other - want).norm() < 0.2 * want.norm()


def test_a_level_under_autocast_trains_as_pytorch_has_it(cuda_autocast, emulated) -> None:
    """Values to the bit: PyTorch interpolates in fp32 and the convolution rounds. Gradients to the rounding."""
    torch.manual_seed(0)
    model = Level().to(memory_format=torch.channels_last)
    report, run = _capture(model)
    found = []
    for function in (run, model):
        x, skip, _ = (t.requires_grad_() for t in _inputs(torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x, skip)
        found.append((y, torch.autograd.grad(y.float().square().sum(), (*model.parameters(), skip, x))))
    assert list(report.matched.values()) == ["bilinear+cat"]
    assert emulated.launches == {"upsample_forward": 1, "concat_copy": 1, "upsample_backward": 1}
    (mine, (*same, dx)), (other, (*as_same, as_dx)) = found
    assert torch.equal(mine, other)
    assert all(map(torch.equal, same, as_same))
    torch.testing.assert_close(dx, as_dx, rtol=2**-7, atol=0)


class Odd(nn.Module):
    """What decoders do with an upsampled value under autocast, by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.conv = nn.Conv2d(16, 16, 1), nn.Conv2d(24, 8, 3, padding=1)
        self.alone, self.transposed = nn.Conv2d(16, 8, 1), nn.ConvTranspose2d(16, 8, 2, 2)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> object:
        x = self.first(x)
        y = F.interpolate(x, scale_factor=2, mode="bilinear" if self.kind != "nearest" else "nearest")
        if self.kind in ("alone", "nearest"):
            return self.alone(y)
        if self.kind == "two":
            return self.alone(y) + self.transposed(y)[:, :, ::2, ::2]
        if self.kind == "sum":
            return self.alone(y), y + 1.0
        if self.kind == "loss":
            return y
        if self.kind == "padded":
            y = F.pad(y[:, :, :5], (0, 0, 1, 0))
        if self.kind == "both":
            return self.conv(torch.cat([skip, y], 1)), self.alone(y)
        both = torch.cat([skip.to(x.dtype), y] if self.kind != "first" else [y, skip.to(x.dtype)], dim=1)
        return (self.conv(both), both.mean()) if self.kind == "mean" else self.conv(both)


@pytest.mark.usefixtures("readable_graphs")
@LOW
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("cat", "bilinear+cat"),
        ("first", "bilinear+cat"),
        ("alone", "bilinear"),
        ("nearest", "nearest"),
        ("two", "bilinear"),
        ("both", "bilinear"),
        ("sum", ""),
        ("loss", ""),
        ("mean", ""),
    ],
)
def test_a_result_is_rounded_where_all_that_reads_it_would(
    cuda_autocast, low: torch.dtype, kind: str, found: str
) -> None:
    torch.manual_seed(0)
    model = Odd(kind)
    x, skip, _ = _inputs()
    seen: list[torch.fx.Graph] = []
    report = match.MatchReport()
    substitute = dynamo.backend({FAMILY.id: report}, mode=None)

    def backend(graph_module: torch.fx.GraphModule, inputs: object) -> object:
        seen.append(graph_module.graph)
        return substitute(graph_module, inputs)

    with torch.autocast("cpu", low), torch.no_grad():
        with dispatch.everything():
            got = torch.compile(model.forward, backend=backend)(x, skip)
        want = model(x, skip)
    if found:
        assert list(report.matched.values()) == [found]
        (put,) = (n for n in seen[0].nodes if n.target is api.upsample_concat)
        assert put.meta["example_value"].dtype == low
    else:
        assert not report.matched
        assert "its fp32 result" in next(iter(report.unmatched.values()))
    torch.testing.assert_close(got, want)  # dtypes too


def test_what_only_moves_a_rounded_value_is_known_to_hold_it(cuda_autocast) -> None:
    """An uneven UNet: padded by a row, then concatenated."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.conv = nn.Conv2d(16, 16, 1), nn.Conv2d(32, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            y = F.interpolate(x, size=(5, 8), mode="bilinear", align_corners=True)
            skip = F.pad(x, (2, 2, 2, 1))
            return self.conv(torch.cat([skip, F.pad(y, [0, 0, 0, 1])], 1))

    torch.manual_seed(0)
    model = Uneven()
    held: dict[str, torch.dtype] = {}
    report = match.MatchReport()
    substitute = dynamo.backend({FAMILY.id: report}, mode=None)

    def backend(graph_module: torch.fx.GraphModule, inputs: object) -> object:
        run = substitute(graph_module, inputs)
        held.update(
            {n.name: n.meta["example_value"].dtype for n in graph_module.graph.nodes if match.value(n) is not None}
        )
        return run

    x = _inputs()[0]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with dispatch.everything():
            got = torch.compile(model.forward, backend=backend)(x)
        want = model(x)
    assert list(report.matched.values()) == ["bilinear"]
    assert {name: dtype for name, dtype in held.items() if "pad" in name or "cat" in name} == {
        name: torch.bfloat16 for name in held if "pad" in name or "cat" in name
    }
    assert torch.equal(got, want)


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
