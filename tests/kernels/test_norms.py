"""LayerNorm, GroupNorm and squeeze-and-excite without a GPU: definitions, what is supported, geometry, operations, fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulation.planted import passes_with
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, pixel_columns, sample_geometry, storage, verify
from advisor.ops.group_norm import api as gn_api
from advisor.ops.group_norm import reference as gn_reference
from advisor.ops.group_norm import spec as gn
from advisor.ops.layer_norm import api as ln_api
from advisor.ops.layer_norm import reference as ln_reference
from advisor.ops.layer_norm import spec as ln
from advisor.ops.squeeze_excite import api as se_api
from advisor.ops.squeeze_excite import reference as se_reference
from advisor.ops.squeeze_excite import spec as se

FAMILIES = ("layer_norm", "group_norm", "squeeze_excite")


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---- definitions


@pytest.mark.parametrize("dim", [1, -1])
def test_layer_norm_is_defined_right(dim: int) -> None:
    x, w, b = leaf(2, 3, 2, 3), leaf(3), leaf(3)
    assert torch.autograd.gradcheck(lambda x, w, b: ln_reference.layer_norm(x, w, b, 1e-5, dim), (x, w, b))
    rows = x if dim == -1 else x.permute(0, 2, 3, 1)
    want = F.layer_norm(rows, (3,), w, b, 1e-5)
    got = ln_reference.layer_norm(x, w, b, 1e-5, dim, torch.float32)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want if dim == -1 else want.permute(0, 3, 1, 2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", gn.ACTIVATIONS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm_is_defined_right(groups: int, activation: str) -> None:
    x, w, b = leaf(2, 4, 2, 3), leaf(4), leaf(4)
    assert torch.autograd.gradcheck(
        lambda x, w, b: gn_reference.group_norm(x, groups, w, b, 1e-5, activation), (x, w, b)
    )
    if groups == 4:
        torch.testing.assert_close(gn_reference.group_norm(x, 4, w, b, 1e-5), F.instance_norm(x, weight=w, bias=b))


@pytest.mark.parametrize("gate", se.GATES)
@pytest.mark.parametrize("activation", se.ACTIVATIONS)
def test_squeeze_excite_is_defined_right(activation: str, gate: str) -> None:
    tensors = leaf(2, 4, 2, 3), leaf(3, 4, 1, 1), leaf(3), leaf(4, 3, 1, 1), leaf(4)

    def f(*tensors: torch.Tensor) -> torch.Tensor:
        return se_reference.squeeze_excite(*tensors, activation, gate)

    assert torch.autograd.gradcheck(f, tensors)
    x, w1, b1, w2, b2 = tensors
    h = F.conv2d(F.adaptive_avg_pool2d(x, 1), w1, b1)
    z = F.conv2d(F.relu(h) if activation == "relu" else F.silu(h), w2, b2)
    torch.testing.assert_close(f(*tensors), x * (torch.sigmoid(z) if gate == "sigmoid" else F.hardsigmoid(z)))


# ---- what is supported


def says(function: Callable[..., str], call: dict[str, Any], change: dict[str, Any], reason: str) -> None:
    answer = function(**{**call, **change})
    assert reason in answer if reason else answer == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"arch": 75}, "older"),
        ({"dtype": "float64"}, "dtype"),
        ({"result": "float32"}, ""),
        ({"result": "float16"}, "result in float16"),
        ({"channels": 100}, "no multiple of 8"),
        ({"channels": 4096}, "more than 2048"),
        ({"channels": 2048, "result": "float32"}, "more than 1536"),
        ({"dtype": "float32", "result": "float32", "channels": 1028}, "more than 1024"),
        ({"contiguous": False}, "not contiguous"),
        ({"rows": 0}, "empty"),
        ({"parameters": ("float32", "bfloat16")}, "parameters in bfloat16"),
    ],
)
def test_layer_norm_says_why_not(change: dict[str, Any], reason: str) -> None:
    call = {
        "rows": 64,
        "channels": 96,
        "contiguous": True,
        "dtype": "bfloat16",
        "result": "bfloat16",
        "parameters": ("float32", "float32"),
        "arch": 90,
    }
    says(ln.unsupported, call, change, reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"shape": (2, 64, 8)}, "3-D"),
        ({"shape": (0, 64, 8, 8)}, "empty"),
        ({"shape": (70_000, 64, 1, 1)}, "more than 65535"),
        ({"shape": (1, 64, 8192, 4096)}, "2^31"),
        ({"shape": (2, 60, 8, 8)}, "no multiple of 8"),
        ({"shape": (2, 64, 1, 1), "groups": 64}, "two values"),
        ({"channels_last": False}, "channels_last"),
        ({"groups": 5}, "64 channels in 5 groups"),
        ({"activation": "gelu"}, "activation gelu"),
        ({"parameters": ("float64",)}, "parameters in float64"),
    ],
)
def test_group_norm_says_why_not(change: dict[str, Any], reason: str) -> None:
    call = {
        "shape": (2, 64, 8, 8),
        "channels_last": True,
        "groups": 32,
        "dtype": "bfloat16",
        "result": "float32",
        "parameters": ("float32", "float32"),
        "activation": "silu",
        "arch": 80,
    }
    says(gn.unsupported, call, change, reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"shape": (2, 64, 8)}, "3-D"),
        ({"shape": (2, 60, 8, 8)}, "no multiple of 8"),
        ({"shape": (2, 4104, 8, 8)}, "more than 4096"),
        ({"hidden": 1025}, "more than 1024"),
        ({"channels_last": False}, "channels_last"),
        ({"activation": "gelu"}, "activation gelu"),
        ({"gate": "tanh"}, "gate tanh"),
        ({"parameters": ("float64",)}, "parameters in float64"),
        ({"arch": 70}, "older"),
    ],
)
def test_squeeze_excite_says_why_not(change: dict[str, Any], reason: str) -> None:
    call = {
        "shape": (2, 64, 8, 8),
        "channels_last": True,
        "hidden": 6,
        "dtype": "float16",
        "parameters": ("float32",) * 4,
        "activation": "relu",
        "gate": "hardsigmoid",
        "arch": 90,
    }
    says(se.unsupported, call, change, reason)


# ---- geometry


@given(
    rows=st.integers(1, 5_000_000),
    pair=st.sampled_from(storage.RESULT_PAIRS),
    data=st.data(),
    sms=st.integers(1, 200),
)
def test_layer_norm_geometry_covers_every_row_and_channel(
    rows: int, pair: tuple[str, str], data: st.DataObject, sms: int
) -> None:
    vectors = data.draw(st.integers(1, 32 * ln.widest(*pair)))
    shape = ln.geometry(rows, vectors * storage.vector_width(pair[0]), *pair, sms)
    assert shape.vectors == vectors <= shape.lanes * shape.lane_vectors
    assert shape.lanes * (shape.lane_vectors // 2) < vectors or shape.lanes == 1  # at most half of it idle
    assert shape.lane_vectors <= ln.widest(*pair)
    a_round = ln.THREADS // shape.lanes * ln.rows_under_way(ln.FORWARD, shape.lane_vectors)
    assert shape.forward_blocks * a_round * ln.FORWARD_ROUNDS >= rows
    assert 1 <= shape.backward_blocks <= sms
    assert -(-shape.backward_blocks // ln.FAN) + 1 <= 1024  # counters
    registers = {1: 128, 2: 128, 3: 128, 4: 168, 6: 255, 8: 255}[shape.lane_vectors]
    assert ln.threads(ln.BACKWARD, shape.lane_vectors) * registers <= 65_536


@given(
    samples=st.integers(1, 2000),
    rows=st.integers(1, 100_000),
    vectors=st.integers(1, 300),
    sms=st.integers(1, 200),
    most=st.sampled_from([64, 100_000]),
)
def test_sample_geometry_covers_every_row_and_channel(
    samples: int, rows: int, vectors: int, sms: int, most: int
) -> None:
    shape = sample_geometry.geometry(
        samples,
        rows,
        vectors,
        threads=gn.THREADS,
        max_tile=gn.MAX_TILE,
        unroll=gn.FORWARD_UNROLL,
        bytes_per_block=gn.BYTES_PER_BLOCK,
        least_blocks=sms * gn.BLOCKS_PER_SM,
        most_splits=most,
    )
    assert 1 <= shape.tile <= gn.MAX_TILE
    assert shape.tile * (shape.tiles - 1) < vectors == shape.vectors <= shape.tile * shape.tiles
    assert 1 <= shape.splits <= most
    a_pass = gn.THREADS // shape.tile * gn.FORWARD_UNROLL
    assert shape.splits == 1 or (shape.splits - 1) * a_pass < rows  # no block without rows


@pytest.mark.parametrize(
    ("samples", "channels", "groups", "lanes"),
    [
        (256, 256, 32, 16),  # 16 groups of 8 channels in a tile of 128: two threads a channel
        (256, 384, 1, 256),  # the whole block
        (256, 256, 256, 2),
        (256, 1016, 4, 128),  # no tile begins or ends with a group
        (2000, 8, 8, 2),  # one partial sum a channel: no work for more
    ],
)
def test_lanes_that_join_a_group(samples: int, channels: int, groups: int, lanes: int) -> None:
    assert gn.geometry(samples, 64, channels, groups, "bfloat16", 132).lanes == lanes


def test_blocks_fill_the_gpu_once_rather_than_once_and_a_little() -> None:
    def blocks(samples: int, rows: int, channels: int) -> int:
        shape = gn.geometry(samples, rows, channels, 32, "bfloat16", 132).apply
        return samples * shape.tiles * shape.splits

    at_once = 132 * gn.BLOCKS_PER_SM
    assert 7 / 8 * at_once <= blocks(16, 64 * 64, 320) <= at_once
    assert 7 / 8 * at_once <= blocks(4, 100 * 168, 256) <= at_once
    assert blocks(150, 56 * 56, 256) >= at_once


@given(
    samples=st.integers(1, 2000),
    pixels=st.integers(1, 100_000),
    vectors=st.integers(1, 600),
    least=st.integers(1, 1000),
    most=st.sampled_from([64, 100_000]),
)
def test_blocks_over_pixel_columns_cover_them_and_none_is_without_pixels(
    samples: int, pixels: int, vectors: int, least: int, most: int
) -> None:
    shape = pixel_columns.geometry(
        samples, pixels, vectors, threads=256, unroll=8, bytes_per_block=131_072, least_blocks=least, most_splits=most
    )
    assert 1 <= shape.tile <= 256
    assert shape.tile * (shape.tiles - 1) < samples * vectors <= shape.tile * shape.tiles
    assert 1 <= shape.splits <= most
    assert shape.splits == 1 or (shape.splits - 1) * (256 // shape.tile) * 8 < pixels


@pytest.mark.parametrize(
    ("vectors", "pixels", "tile"),
    [
        (4, 12544, 4),  # the whole of a pixel
        (18, 3136, 18),
        (60, 196, 60),
        (43, 196, 64),  # 43 would leave 41 of 256 threads idle
        (144, 49, 64),
        (120, 9, 128),  # two threads a column: nine pixels are no work for four
        (8, 1, 256),
    ],
)
def test_columns_of_a_block(vectors: int, pixels: int, tile: int) -> None:
    assert pixel_columns.tile_for(vectors, pixels, 256) == tile


@pytest.mark.parametrize(
    ("pieces", "size", "slices"),
    [(128, 960, 8), (1000, 240, 2), (2000, 240, 1), (4, 16, 1), (4, 40, 4)],
)
def test_warps_that_share_a_piece_fill_the_gpu_and_have_work(pieces: int, size: int, slices: int) -> None:
    assert se.slices(pieces, size, 132) == slices


@given(samples=st.integers(1, 600), channels=st.integers(1, 300), hidden=st.integers(1, 512), sms=st.integers(1, 200))
def test_products_of_squeeze_excite_cover_their_results(samples: int, channels: int, hidden: int, sms: int) -> None:
    channels *= 8
    found = se.geometry(samples, 49, channels, hidden, "bfloat16", sms)
    warps = se.GATE_THREADS // 32

    def covered(blocks: int, slices: int, rows: int, columns: int, tall: int) -> bool:
        pieces = -(-rows // (16 * tall)) * -(-columns // 32)
        return (blocks - 1) * (warps // slices) < pieces <= blocks * (warps // slices)

    both = found.squeeze_backward
    assert covered(found.squeeze.blocks, found.squeeze.slices, samples, hidden, 1)
    assert covered(found.excite.blocks, found.excite.slices, samples, channels, se.TALL)
    assert covered(found.pool_blocks, both.slices, samples, channels, se.TALL)
    assert covered(found.weight_blocks, found.weight_slices, hidden, channels + 1, se.TALL)
    rest = both.blocks - found.pool_blocks - found.weight_blocks
    assert covered(rest, found.weight_slices, channels, hidden + 1, se.TALL)


def test_bytes_that_must_move() -> None:
    assert ln.bytes_moved(elements=10, dtype="bfloat16", result="float32") == (60, 80)
    assert gn.bytes_moved(elements=10, dtype="bfloat16", result="bfloat16") == (60, 100)
    assert se.bytes_moved(elements=10, dtype="float32") == (120, 160)


# ---- operations


def arguments(family: str) -> tuple[Any, ...]:
    """Of the function and the operation, small, on the CPU."""
    x = torch.randn(2, 5, 4, 8).permute(0, 3, 1, 2).requires_grad_()
    w, b = torch.rand(8, requires_grad=True), torch.rand(8, requires_grad=True)
    if family == "layer_norm":
        return x, w, b, 1e-5, 1, torch.float32
    if family == "group_norm":
        return x, 4, w, b, 1e-5, "leaky_relu", torch.float32, 0.2
    w1, w2 = torch.randn(3, 8, 1, 1, requires_grad=True), torch.randn(8, 3, 1, 1, requires_grad=True)
    return x, w1, torch.rand(3, requires_grad=True), w2, b, "relu", "sigmoid"


API = {
    "layer_norm": (ln_api.layer_norm, ln_api.layer_norm_op),
    "group_norm": (gn_api.group_norm, gn_api.group_norm_op),
    "squeeze_excite": (se_api.squeeze_excite, se_api.squeeze_excite_op),
}
REFERENCE = {
    "layer_norm": ln_reference.layer_norm,
    "group_norm": gn_reference.group_norm,
    "squeeze_excite": se_reference.squeeze_excite,
}


def first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_obey_torch_library(emulated: Any, family: str) -> None:
    operation = API[family][1]
    torch.library.opcheck(
        operation,
        arguments(family),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
    )


def gradients(function: Callable[..., Any], given: tuple[Any, ...]) -> list[torch.Tensor]:
    leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
    y = first(function(*given))
    torch.manual_seed(1)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.randn_like(y))]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_measured_runs_pytorch_and_is_counted(family: str) -> None:
    given = arguments(family)
    dispatch.clear()
    got = gradients(API[family][0], given)
    assert catalog.get(family).engaged == {}
    assert sum(catalog.get(family).fell_back.values()) == 1
    for mine, other in zip(got, gradients(REFERENCE[family], given), strict=True):
        torch.testing.assert_close(mine, other)
    dispatch.clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_in_the_middle_of_a_buffer(emulated: Any, family: str) -> None:
    """Not at a multiple of 16 bytes: the function runs PyTorch's own, the operation a copy."""
    function, operation = API[family]
    given = tuple(
        torch.cat([torch.zeros(1), t.detach().flatten()])[1:].view(t.shape)
        if isinstance(t, torch.Tensor) and t.dtype == torch.float32 and number
        else t
        for number, t in enumerate(arguments(family))
    )
    dispatch.clear()
    want = function(*given)
    assert "aligned" in next(iter(catalog.get(family).fell_back))
    torch.testing.assert_close(first(operation(*given)), want, rtol=1e-5, atol=1e-5)
    dispatch.clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_work_as_function_and_as_operation(emulated: Any, family: str) -> None:
    function, operation = API[family]
    given = arguments(family)
    dispatch.clear()
    with_kernels = gradients(function, given), gradients(operation, given)
    assert sum(catalog.get(family).engaged.values()) == 2
    assert set(emulated.launches) == {entry for entries in catalog.get(family).kernels.values() for entry in entries}
    dispatch.clear()
    for got in with_kernels:
        for mine, other in zip(got, gradients(REFERENCE[family], given), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_second_derivatives(emulated: Any, family: str) -> None:
    def penalty(function: Callable[..., Any]) -> list[torch.Tensor]:
        given = arguments(family)
        leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
        (dx, *_) = torch.autograd.grad(first(function(*given)).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(dx.square().sum(), leaves, allow_unused=True, materialize_grads=True))

    torch.manual_seed(3)
    got = penalty(API[family][0])
    torch.manual_seed(3)
    want = penalty(REFERENCE[family])
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_many_blocks_add_up_in_two_levels(emulated: Any) -> None:
    emulated.use(sm_count=40)
    rows, c = 49 * 8, 768
    blocks = ln.geometry(rows, c, "bfloat16", "bfloat16", 40).backward_blocks
    assert blocks > 2 * ln.FAN
    x = torch.randn(rows, c).bfloat16().requires_grad_()
    w, b = torch.rand(c, requires_grad=True), torch.rand(c, requires_grad=True)
    dy = torch.randn(rows, c).bfloat16()
    got = torch.autograd.grad(ln_api.layer_norm(x, w, b, 1e-6), (x, w, b), dy)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    want = torch.autograd.grad(ln_reference.layer_norm(*wide, 1e-6), wide, dy.double())
    for mine, other, bound in zip(got, want, (4e-3, 1e-6, 1e-6), strict=True):
        assert (mine.double() - other).norm() < bound * other.norm()


def test_a_mean_far_from_zero_does_not_cancel(emulated: Any) -> None:
    x = torch.randn(2, 9, 9, 16).permute(0, 3, 1, 2) + 3000.0
    for got, want in (
        (gn_api.group_norm(x, 4, None, None, 1e-5), gn_reference.group_norm(x.double(), 4, None, None, 1e-5)),
        (ln_api.layer_norm(x, None, None, 1e-5, 1), ln_reference.layer_norm(x.double(), None, None, 1e-5, 1)),
    ):
        assert (got.double() - want).norm() < 1e-3 * want.norm()


# ---- planted faults: family, case by shape, what is taken out or changed

FAULTS = {
    "halves of a wide result": ("layer_norm to fp32", "odd ? a[j] : b[j]", "odd ? b[j] : a[j]"),
    "the tree's first level": ("layer_norm", "add_rows(partial, first, members, width", "add_rows(partial, first, 1, width"),
    "idle lanes in the variance": ("layer_norm", "if (lane + k * LANES >= vectors) continue;", ""),
    "a warp's rows in the weights' gradients": ("layer_norm", "o < 32; o *= 2", "o < 16; o *= 2"),
    "barrier of the sums": ("group_norm", "  __syncthreads();\n  for (int o = threadIdx.x; o < COUNT", "  for (int o = threadIdx.x; o < COUNT"),
    "splits of a sample": ("group_norm", "s < parts; s +=", "s < parts - 1; s +="),
    "strips of a channel's partial sums": ("group_norm", "i < per_group * strips", "i < per_group"),
    "barrier of the warps that share a group": ("group_norm in one group", "  __syncthreads();\n      if (lane == 0)", "  if (lane == 0)"),
    "warps that share a group": ("group_norm in one group", "w < lanes / 32", "w < 1"),
    "samples of the parameters' gradients": ("group_norm", "i < samples * parts", "i < samples * parts - 1"),
    "barrier of a column's sums": ("squeeze_excite in fp32", "  __syncthreads();\n  // A thread adds up one", "  // A thread adds up one"),
    "barrier of the slices' sums": ("squeeze_excite", "  __syncthreads();\n  const float* of", "  const float* of"),
    "a part of the pool's sums": ("squeeze_excite in parts", "part < parts; ++part", "part < parts - 1; ++part"),
    "operands of a result's later values": ("squeeze_excite on one SM", "next + i < last ? early(row_of(next + i)", "next + i < last ? early(row_of(v + i)"),
    "a slice of a product": ("squeeze_excite", "s < slices; ++s", "s < slices - 1; ++s"),
    "the small products of fp32": ("squeeze_excite in fp32", "if (SPLIT && s - s == 0.f)", "if (false)"),
    "samples behind the last": ("squeeze_excite", "k + q < samples && m < rows ? at", "m < rows ? at"),
    "biases' column of ones": ("squeeze_excite", "out[q].v[i] = 1.f", "out[q].v[i] = 0.f"),
}  # fmt: skip
PLANTED_IN = {
    "layer_norm": (2, 72, 9, 9),
    "layer_norm to fp32": (1, 1536, 4, 3),
    "group_norm": (2, 64, 16, 24),
    "group_norm in one group": (2, 72, 7, 5),
    "squeeze_excite": (37, 136, 2, 2),
    "squeeze_excite in fp32": (1, 200, 7, 5),
    "squeeze_excite on one SM": (37, 136, 2, 2),
    "squeeze_excite in parts": (2, 16, 70, 70),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_a_kernel_is_found(emulated: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    family, before, after = FAULTS[fault]
    planted = catalog.get(family.split()[0])
    case = next(c for c in planted.verification if c.shape == PLANTED_IN[family])
    sm_count = 1 if "one SM" in family else 12
    emulated.use(sm_count=sm_count)
    assert verify.check(planted, case, "cpu")["passed"]
    emulated.use(sm_count=sm_count)
    assert not passes_with(monkeypatch, planted, case, before, after)
