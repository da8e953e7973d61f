"""The batch-norm kernels emulated, beyond the verification cases: planted faults, other devices, compiled and captured graphs."""

from __future__ import annotations

import pytest
import torch
from emulation import compiler, device
from emulation.planted import passes_with
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dynamo, match, nvrtc, storage, verify
from advisor.ops.batchnorm_act import api, cases, cuda, reference, spec
from advisor.ops.batchnorm_act.norm import Norm

FAMILY = catalog.get("batchnorm_act")


def case(dtype: str, activation: str, residual: bool, shape: tuple[int, ...], way: str | None = spec.TWO):
    return cases.case_of(shape, dtype, activation, residual, way=way)


# What is taken out or changed, and by what the check must see it.
FAULTS = {
    "no barrier before the block's sums": ("    }\n  }\n  __syncthreads();\n  for (int o", "    }\n  }\n  for (int o"),
    "last block's barrier": ("scratch[threadIdx.x] = sum;\n    __syncthreads();", "scratch[threadIdx.x] = sum;"),
    "one row less": ("row < rows; row += UNROLL", "row < rows - 1; row += UNROLL"),
    "one row more": ("if (row + u * stride >= rows) continue;", "if (row + u * stride >= rows + stride) continue;"),
    "one channel of a vector": ("const float d = f[j] - shift[j];", "const float d = f[j & ~1] - shift[j];"),
    "ticket left": ("ticket[blockIdx.y] = 0u", "ticket[blockIdx.y] = 1u"),
    "blocks' partials overwritten": ("((i64)blockIdx.x * 2 + stat)", "((i64)(blockIdx.x & ~1u) * 2 + stat)"),
    "mask of the neighbour": ("mask[at] = (unsigned char)bits", "mask[at + 1] = (unsigned char)bits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after = FAULTS[fault]
    assert not passes_with(monkeypatch, FAMILY, case("bfloat16", "relu", True, (4, 64, 28, 28)), before, after)


# As above, in the kernels of one launch. By shape: the first has one row a thread, the second six.
HELD_FAULTS = {
    "no barrier before the block's sums": ("  __syncthreads();\n  if (threadIdx.x < 2 * width) {", "  if (threadIdx.x < 2 * width) {"),
    "no barrier before the cluster's sums": ("  cluster_arrive();\n  cluster_wait();\n  first", "  first"),
    "a block returns too early": ("  cluster_wait();\n}\n", "}\n"),
    "the first block's sums alone": ("cluster_read(block + threadIdx.x, rank)", "cluster_read(block + threadIdx.x, 0)"),
    "no barrier before the constants": ("  __syncthreads();\n  float mean[VEC], scale[VEC], offset", "  float mean[VEC], scale[VEC], offset"),
    "one row less": ("t.vector < 0 ? 0 : rows;", "t.vector < 0 ? 0 : rows - 1;"),
    "one row more": ("t.vector < 0 ? 0 : rows;", "t.vector < 0 ? 0 : rows + t.stride;"),
    "lanes of another vector": ("offset >= tile; offset", "offset >= 1; offset"),
    "dy not masked": ("vdy[u] = narrow(g);", ""),
    "mask of the neighbour": ("mask[place] = (unsigned char)bits", "mask[place ^ 1] = (unsigned char)bits"),
}  # fmt: skip


@pytest.mark.parametrize("fault", HELD_FAULTS)
def test_a_fault_planted_in_the_kernels_of_one_launch_is_found(
    emulated, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    held = cases.case_of((4, 64, 9, 7), "bfloat16", "relu", True, way=spec.CLUSTER)
    assert not passes_with(monkeypatch, FAMILY, held, *HELD_FAULTS[fault])


# As above, in what makes channels of joined rows' columns. With a residual: x and its gradient are not of one size then.
JOINED_FAULTS = {
    "one column's mean": ("const double mean = sum / joined;", "const double mean = means[0];"),
    "distances between columns left out": ("1.0 / (inverse * inverse) + d * d", "1.0 / (inverse * inverse)"),
    "weight of the neighbour": ("column[2 * width] = weight[c];", "column[2 * width] = weight[c ^ 1];"),
    "one column's constants": ("float* column = saved + k * channels + c;", "float* column = saved + c;"),
    "running variance of too few rows": ("rows / (rows - 1.0)", "rows / (rows - joined)"),
    "columns' coefficients as they were": ("(float)(total[i] / joined)", "columns[i * width + k * channels + c]"),
    "coefficients added up": ("(float)(total[i] / joined)", "(float)total[i]"),
    "one column's sum": ("dbias[c] = (float)total[3];", "dbias[c] = columns[3 * width + c];"),
    "a channel without a thread": ("if (c >= channels) return;", "if (c >= channels - 1) return;"),
}


@pytest.mark.parametrize("fault", JOINED_FAULTS)
def test_a_fault_planted_where_rows_are_joined_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    joined = cases.case_of((8, 58, 3, 5), "bfloat16", "relu", True)
    assert verify.check(FAMILY, joined, "cpu")["passed"]
    emulated.use()  # what that has compiled is forgotten
    assert not passes_with(monkeypatch, FAMILY, joined, *JOINED_FAULTS[fault])


def test_joined_rows_are_three_launches_and_have_a_second_derivative(emulated) -> None:
    torch.manual_seed(0)
    x, dy = (torch.randn(8, 6, 3, 5).contiguous(memory_format=torch.channels_last) for _ in range(2))
    weight, bias = torch.rand(6) + 0.5, torch.randn(6)
    found = []
    with dispatch.everything():
        for function, dtype in ((api.batchnorm_act, torch.float32), (reference.batchnorm_act, torch.float64)):
            leaves = [t.to(dtype).requires_grad_() for t in (x, weight, bias)]
            y = function(leaves[0], None, None, None, *leaves[1:], 0.1, 1e-5, "silu")
            gradients = torch.autograd.grad(y, leaves, dy.to(dtype), create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)
            found.append([*gradients, *second])
            if dtype == torch.float32:
                plain = torch.autograd.grad(
                    function(leaves[0], None, None, None, *leaves[1:], 0.1, 1e-5, "silu"), leaves, dy
                )
                for once, again in zip(plain, gradients, strict=True):
                    torch.testing.assert_close(once, again, rtol=1e-4, atol=1e-4)
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=1e-3, atol=1e-3)
    assert emulated.launches["batchnorm_join_statistics"] == 2
    assert emulated.launches["batchnorm_join_sums"] == 1  # the other backward was PyTorch's, to be differentiated


def test_a_norm_of_joined_rows_takes_no_moments_and_has_one_result(emulated) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm2d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.bn(x).relu()
            return y.sigmoid() + y.tanh()

    torch._dynamo.reset()
    net, plain = Twice().train(), Twice().train()
    report = match.MatchReport()
    run = torch.compile(net.forward, backend=dynamo.backend({"batchnorm_act": report}, mode=None), dynamic=False)
    x = torch.randn(8, 6, 3, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    with dispatch.everything():
        (dx,) = torch.autograd.grad(run(x).sum(), x)
    assert report.matched == {"bn": "bn+relu (joined rows)"}
    torch.testing.assert_close(dx, torch.autograd.grad(plain(x).sum(), x)[0], rtol=1e-3, atol=1e-5)
    assert emulated.launches["batchnorm_join_sums"] == 1
    for mine, other in zip(net.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


# As above, in the launch of the whole grid, with one row a thread in registers and one in shared memory.
GRID_FAULTS = {
    "a block that says nothing": ("if (lane < tile) send(", "if (lane < tile && blockIdx.x) send("),
    "what the launch before has said left": ("  clear_before(exchange, before);\n", ""),
    "less noted than was said": ("return gridDim.x * gridDim.y * 2 * width;", "return gridDim.x * gridDim.y * width;"),
    "one block's sums left out": ("p < blocks; p += AT_ONCE", "p < blocks - 1; p += AT_ONCE"),
    "no barrier before the block's sums": ("  __syncthreads();\n  float* const mine", "  float* const mine"),
    "no barrier before the column's sums": ("  __syncthreads();\n  first = second", "  first = second"),
    "no barrier before the constants": ("  __syncthreads();\n  Channel k;\n#pragma", "  Channel k;\n#pragma"),
    "copies of x not waited for": ("cp_async_wait<1>();", ""),
    "copies of the residual not waited for": ("cp_async_wait<0>();\n  __syncthreads();", "__syncthreads();"),
    "copies of dy not waited for": ("cp_async_wait<0>();\n  // This", "// This"),
    "one row less": ("t.vector < 0 ? 0 : rows;", "t.vector < 0 ? 0 : rows - 1;"),
    "the neighbour's residual": ("? load_slot(other + (first + u) *", "? load_slot(other + (first + u - 1) *"),
}  # fmt: skip


@pytest.fixture
def one_row(emulated, monkeypatch: pytest.MonkeyPatch):
    """The device, with kernels of the whole grid that hold one row a thread in registers: quickly compiled."""
    monkeypatch.setattr(spec, "GRID_ROWS", 1)
    emulated.use()
    return emulated


@pytest.mark.parametrize("fault", GRID_FAULTS)
def test_a_fault_planted_in_the_kernels_of_the_whole_grid_is_found(
    one_row, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    grid = cases.case_of((4, 64, 9, 7), "bfloat16", "relu", True, way=spec.GRID)
    assert not passes_with(monkeypatch, FAMILY, grid, *GRID_FAULTS[fault])


def test_blocks_that_wait_for_each_other_are_launched_so_that_all_run(one_row, monkeypatch: pytest.MonkeyPatch) -> None:
    call = device.Entry.__call__
    monkeypatch.setattr(device.Entry, "__call__", lambda *given, **_: call(*given))
    grid = cases.case_of((4, 64, 9, 7), "bfloat16", "relu", True, way=spec.GRID)
    with pytest.raises(compiler.EmulationError, match="not cooperative"):
        verify.check(FAMILY, grid, "cpu")


@pytest.mark.parametrize("tiles", [(2,), (6,), (10,)])
def test_every_width_of_a_tile_of_the_whole_grid_gives_the_same_result(
    one_row, monkeypatch, tiles: tuple[int, ...]
) -> None:
    monkeypatch.setattr(spec, "GRID_TILES", tiles)
    one_row.use(sm_count=16)
    for forked in (False, True):
        grid = cases.case_of((3, 120, 9, 7), "bfloat16", "relu", True, way=spec.GRID, forked=forked)
        row = verify.check(FAMILY, grid, "cpu")
        assert row["passed"], row["detail"]
    assert one_row.launches["batchnorm_act_grid_forward"]
    assert set(one_row.launches) == {"batchnorm_act_grid_forward", "batchnorm_act_grid_backward"}


def test_launches_of_all_sizes_keep_their_sums_apart(one_row) -> None:
    one_row.use(sm_count=8)
    found = []
    for shape in ((4, 64, 9, 7), (2, 8, 3, 3), (3, 128, 5, 3), (4, 64, 9, 7), (4, 64, 9, 7)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)
        c = shape[1]
        running, weight, bias = [torch.zeros(c), torch.ones(c)], torch.ones(c), torch.zeros(c)
        norm = Norm(*running, weight, bias, 0.1, 1e-5, "relu", 0.0)
        y, saved, mask = cuda.forward(x, None, norm, way=spec.GRID)
        gradients = cuda.backward(x, None, x, saved, mask, norm, False, way=spec.GRID)
        found.append([y, *running, *(g for g in gradients if g is not None)])
    assert one_row.launches["batchnorm_act_grid_forward"] == one_row.launches["batchnorm_act_grid_backward"] == 5
    for later in found[3:]:
        assert all(torch.equal(a, b) for a, b in zip(later, found[0], strict=True))


# As above, where rows that the chip has no room for are read twice.
STREAM_FAULTS = {
    "rows left out of the sums": ("(HOLD + kept) * t.stride; row", "(HOLD + kept + 1) * t.stride; row"),
    "rows not read again": ("last = passes - 1;", "last = passes - 2;"),
    "the gradient from above for that of the sum": ("load_written(dresidual + place)", "load(dy + place)"),
}


@pytest.mark.parametrize("fault", STREAM_FAULTS)
def test_a_fault_planted_where_rows_are_read_twice_is_found(
    one_row, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    one_row.use(sm_count=1)
    monkeypatch.setattr(spec, "grid_slots", lambda *_, **__: 0)
    grid = cases.case_of((4, 64, 9, 14), "bfloat16", "relu", True, way=spec.GRID)
    assert not passes_with(monkeypatch, FAMILY, grid, *STREAM_FAULTS[fault])


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("activation", "residual"), [("none", False), ("silu", False), ("relu", True), ("none", True)])
@pytest.mark.parametrize("slots", [0, 1, 2, 3])
def test_what_the_chip_does_not_hold_goes_by_twice(
    one_row, monkeypatch: pytest.MonkeyPatch, dtype: str, activation: str, residual: bool, slots: int
) -> None:
    one_row.use(sm_count=1)
    monkeypatch.setattr(spec, "grid_slots", lambda *_, **__: slots)
    for forked in (False, True):
        grid = cases.case_of((4, 64, 9, 14), dtype, activation, residual, way=spec.GRID, forked=forked)
        one_row.launches.clear()
        row = verify.check(FAMILY, grid, "cpu")
        assert row["passed"], row["detail"]
        assert set(one_row.launches) == {"batchnorm_act_grid_forward", "batchnorm_act_grid_backward"}


@pytest.mark.parametrize(
    ("window", "grid"), [((0, 32256), True), ((32256, 32256), True), ((0, 32255), False), ((32257, 1 << 30), False)]
)
def test_size_decides_on_the_whole_grid(one_row, monkeypatch, window: tuple[int, int], grid: bool) -> None:
    monkeypatch.setattr(spec, "GRID_LEAST_BYTES", window[0])
    monkeypatch.setattr(spec, "GRID_MOST_BYTES", window[1])
    assert verify.check(FAMILY, case("bfloat16", "relu", False, (4, 64, 9, 7), None), "cpu")["passed"]
    assert bool(one_row.launches["batchnorm_act_grid_forward"]) is grid
    assert bool(one_row.launches["batchnorm_act_grid_backward"]) is grid
    assert bool(one_row.launches["batchnorm_act_held_forward"]) is not grid


def test_beside_collectives_no_launch_waits_for_all_sms(one_row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "GRID_LEAST_BYTES", 0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert verify.check(FAMILY, case("bfloat16", "relu", False, (4, 64, 9, 7), None), "cpu")["passed"]
    assert not [kernel for kernel in one_row.launches if "grid" in kernel]


def test_without_memory_to_exchange_sums_through_there_are_two_launches(one_row, monkeypatch) -> None:
    monkeypatch.setattr(nvrtc, "exchange", lambda device, half: 0)
    grid = cases.case_of((4, 64, 9, 7), "bfloat16", "relu", True, way=spec.GRID)
    assert verify.check(FAMILY, grid, "cpu")["passed"]
    assert not [kernel for kernel in one_row.launches if "grid" in kernel]
    assert one_row.launches["batchnorm_act_stats"]


FROZEN_FAULTS = {
    "statistics of the batch": ("mean[j] = running_mean[c]", "mean[j] = 0.f"),
    "one row less": ("if (row + u * stride >= rows) continue;", "if (row + u * stride >= rows - 1) continue;"),
    "mask of the neighbour": ("mask[at] = (unsigned char)bits", "mask[at ^ 1] = (unsigned char)bits"),
    "dresidual scaled": ("store(dresidual + at, narrow(g));", ";"),
    "dweight not normalised": ("total[width + o] / sqrt(", "total[width + o] * sqrt("),
}


@pytest.mark.parametrize("fault", FROZEN_FAULTS)
def test_a_fault_planted_in_the_frozen_kernels_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    frozen = cases.frozen_case_of((4, 64, 9, 7), "bfloat16", "relu", True, True)
    assert not passes_with(monkeypatch, FAMILY, frozen, *FROZEN_FAULTS[fault])


@pytest.mark.long
@pytest.mark.parametrize(("sm_count", "tile"), [(8, 8), (50, 2), (132, 2)])
def test_every_width_of_a_tile_in_one_launch_gives_the_same_result(emulated, sm_count: int, tile: int) -> None:
    emulated.use(sm_count=sm_count)
    assert spec.held(spec.HELD_FORWARD, 252, 64, "bfloat16", sm_count=sm_count).tile == tile
    row = verify.check(FAMILY, cases.case_of((4, 64, 9, 7), "bfloat16", "relu", True, way=spec.CLUSTER), "cpu")
    assert row["passed"], row["detail"]


def test_one_launch_goes_as_far_as_registers_hold(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    one = cases.case_of((4, 64, 9, 7), "bfloat16", "relu", True, way=spec.CLUSTER)
    for rows, forward, backward in ((1, True, True), (0, False, False)):
        emulated.launches.clear()
        monkeypatch.setattr(spec, "HELD_ROWS", dict.fromkeys(spec.HELD_ROWS, rows))
        emulated.use()
        assert verify.check(FAMILY, one, "cpu")["passed"]
        assert bool(emulated.launches["batchnorm_act_held_forward"]) is forward
        assert bool(emulated.launches["batchnorm_act_held_backward"]) is backward
        assert bool(emulated.launches["batchnorm_act_stats"]) is not forward
    emulated.launches.clear()
    monkeypatch.undo()


@pytest.mark.parametrize(("limit", "arch", "held"), [(0, 90, False), (4 * 64 * 63 * 2, 90, True), (1 << 40, 80, False)])
def test_size_and_architecture_decide_on_one_launch(emulated, monkeypatch, limit: int, arch: int, held: bool) -> None:
    emulated.use(arch=arch)
    monkeypatch.setattr(spec, "HELD_BYTES", limit)
    assert verify.check(FAMILY, case("bfloat16", "relu", False, (4, 64, 9, 7), None), "cpu")["passed"]
    assert bool(emulated.launches["batchnorm_act_held_forward"]) is held
    assert bool(emulated.launches["batchnorm_act_held_backward"]) is held
    assert bool(emulated.launches["batchnorm_act_stats"]) is not held


@pytest.mark.parametrize("sm_count", [1, 2, 132])
def test_every_number_of_blocks_gives_the_same_result(emulated, sm_count: int) -> None:
    emulated.use(sm_count=sm_count)
    for dtype, activation, residual in (("bfloat16", "relu", True), ("float32", "silu", False)):
        row = verify.check(FAMILY, case(dtype, activation, residual, (4, 64, 28, 28)), "cpu")
        assert row["passed"], row["detail"]


def test_mean_far_from_zero_does_not_cancel(emulated) -> None:
    generator = torch.Generator().manual_seed(5)
    x = (torch.randn(4, 28, 28, 64, generator=generator) + 3000.0).permute(0, 3, 1, 2)
    weight, bias, running = torch.ones(64), torch.zeros(64), [torch.zeros(64), torch.ones(64)]
    y, _, _ = cuda.forward(x, None, Norm(*running, weight, bias, 0.1, 1e-5))
    wide = [torch.zeros(64).double(), torch.ones(64).double()]
    want = reference.batchnorm_act(x.double(), None, *wide, weight.double(), bias.double(), 0.1, 1e-5)
    assert (y - want).norm() / want.norm() < 1e-3
    assert (running[1] - wide[1]).norm() / wide[1].norm() < 1e-4


@pytest.mark.parametrize("function", [api.batchnorm_act, api.frozen_batchnorm_act])
def test_a_norm_without_weight_and_bias_is_the_same_whatever_the_default_dtype(emulated, function) -> None:
    """Kernels read ones and zeros in fp32."""
    x = torch.randn(2, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    statistics = {api.batchnorm_act: (0.1, 1e-5), api.frozen_batchnorm_act: (1e-5,)}[function]
    found = []
    for default in (torch.float32, torch.float64, torch.bfloat16):
        mean, variance = torch.zeros(16), torch.ones(16)
        torch.set_default_dtype(default)
        try:
            found.append(function(x, None, mean, variance, None, None, *statistics, "relu"))
        finally:
            torch.set_default_dtype(torch.float32)
    assert emulated.launches
    assert found[0].count_nonzero()
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize(
    ("activation", "residual", "affine"), [("relu", True, True), ("silu", False, True), ("relu", False, False)]
)
def test_second_derivatives_of_a_frozen_norm(emulated, activation: str, residual: bool, affine: bool) -> None:
    frozen = cases.frozen_case_of((2, 8, 3, 3), "float32", activation, residual, affine)
    arguments = frozen.inputs(torch.Generator().manual_seed(3), 2)
    leaves = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]

    def penalty(function, values) -> list[torch.Tensor]:
        mine = [t for t in values if isinstance(t, torch.Tensor) and t.requires_grad]
        above = torch.linspace(-1, 1, 144, dtype=mine[0].dtype).view(2, 8, 3, 3).requires_grad_()
        found = torch.autograd.grad(function(*values), mine, above, create_graph=True)
        again = (*mine, above)
        second = torch.autograd.grad(sum(g.square().sum() for g in found), again, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for g, t in zip(second, again, strict=True)]

    wide = [
        t.detach().double().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in arguments
    ]
    mine, want = penalty(frozen.ours, arguments), penalty(frozen.reference, wide)
    assert emulated.launches == {"batchnorm_act_frozen_forward": 1}
    for got, other in zip(mine, want, strict=True):
        torch.testing.assert_close(got.double(), other, rtol=1e-4, atol=1e-4)
    assert len(leaves) == 1 + residual + 2 * affine


@pytest.mark.parametrize(
    ("activation", "affine", "kept"),
    [("relu", True, True), ("relu", False, False), ("none", False, False), ("silu", False, True)],
)
def test_a_frozen_norm_keeps_its_input_only_where_its_backward_reads_it(
    emulated, activation: str, affine: bool, kept: bool
) -> None:
    frozen = cases.frozen_case_of((2, 8, 3, 3), "bfloat16", activation, False, affine)
    x, *rest = frozen.inputs(torch.Generator().manual_seed(3), 2)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        api.frozen_batchnorm_act(x, *rest)
    assert (x.data_ptr() in saved) is kept


class Odd(nn.Module):
    """A norm of each kind that networks seldom train: frozen, without affine parameters, without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.plain, self.batch = (
            nn.BatchNorm2d(16),
            nn.BatchNorm2d(16, affine=False),
            nn.BatchNorm2d(16, track_running_stats=False),
        )
        nn.init.uniform_(self.frozen.running_var, 0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.batch(F.silu(self.plain(F.relu(self.frozen(x))))) + x)


def test_norms_that_networks_seldom_train_run_on_the_kernels_too(emulated) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, plain = Odd().to(memory_format=torch.channels_last), Odd().double()
    plain.load_state_dict(model.state_dict())
    model.frozen.eval()
    plain.frozen.eval()
    reports = {FAMILY.id: match.MatchReport()}
    run = torch.compile(model.forward, backend=dynamo.backend(reports, mode=None), dynamic=False)
    for _ in range(2):
        x = torch.randn(4, 16, 6, 6).contiguous(memory_format=torch.channels_last)
        mine, other = x.requires_grad_(), x.detach().double().requires_grad_()
        run(mine).square().sum().backward()
        plain(other).square().sum().backward()
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-3, atol=1e-3)
    assert reports[FAMILY.id].matched == {
        "frozen": "bn+relu (frozen)",
        "plain": "bn+silu (no affine parameters)",
        "batch": "bn+add+relu (no running statistics)",
    }
    assert emulated.launches["batchnorm_act_frozen_forward"] == 2
    assert emulated.launches["batchnorm_act_frozen_backward"] == 2
    assert emulated.launches["batchnorm_act_held_forward"] == 4
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, msg=name, rtol=1e-3, atol=1e-3)
    for (name, mine), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), other.double(), msg=name, rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    """A residual block: three batch norms, an addition and two activations, and one that nothing can be done about."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.short, self.bn3 = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(F.hardswish(self.bn1(self.conv1(x)))))
        return F.relu(out + self.bn3(self.short(x)))


def test_a_captured_model_trains_on_the_kernels_as_the_plain_one(emulated) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, plain = Block().to(memory_format=torch.channels_last), Block().double()
    plain.load_state_dict(model.state_dict())
    reports = {FAMILY.id: match.MatchReport()}
    run = torch.compile(model.forward, backend=dynamo.backend(reports, mode=None), dynamic=False)
    for _ in range(2):
        x = torch.randn(4, 8, 6, 6).contiguous(memory_format=torch.channels_last)
        run(x).square().sum().backward()
        plain(x.double()).square().sum().backward()
    assert reports[FAMILY.id].matched == {"bn1": "bn+hardswish", "bn2": "bn+add+relu", "bn3": "bn"}
    assert emulated.launches == {"batchnorm_act_held_forward": 6, "batchnorm_act_held_backward": 6}
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, msg=name, rtol=1e-3, atol=1e-3)
    for (name, mine), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), other.double(), msg=name, rtol=1e-5, atol=1e-6)


def test_the_torch_library_operation_gives_the_same_as_the_function(emulated) -> None:
    arguments = case("bfloat16", "relu", True, (3, 72, 9, 7), None).inputs(torch.Generator().manual_seed(1), 3)
    x, residual, mean, variance, weight, bias, *_ = arguments
    y, statistics, _ = torch.ops.advisor.batchnorm_act(*arguments)
    before = mean.clone()
    plain = api.batchnorm_act(*arguments)
    assert torch.equal(y, plain)
    assert torch.equal(statistics[2:], torch.stack([mean, variance]))
    assert not torch.equal(before, mean)
    leaves = (x, residual, weight, bias)
    for mine, other in zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(plain.sum(), leaves), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(("activation", "residual"), [("relu", True), ("none", True), ("none", False), ("silu", False)])
def test_the_operations_of_the_library(emulated, activation: str, residual: bool) -> None:
    arguments = case("bfloat16", activation, residual, (2, 24, 5, 3)).inputs(torch.Generator().manual_seed(1), 2)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.advisor.batchnorm_act.default, arguments, test_utils=tests)
    y, statistics, mask = torch.ops.advisor.batchnorm_act(*arguments)
    assert torch.equal(arguments[2], torch.zeros_like(arguments[2]))  # no side effects
    plain = api.batchnorm_act(*arguments)
    assert torch.equal(y, plain)
    assert torch.equal(statistics[2:], torch.stack(arguments[2:4]))
    leaves, dy = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad], torch.randn_like(y)
    for mine, other in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(plain, leaves, dy), strict=True):
        assert torch.equal(mine, other)
    tensors, settings = [t if t is None else t.detach() for t in arguments[:6]], arguments[6:]
    x, *unread, weight, bias = tensors
    shapes = [one for t in unread for one in (None, None if t is None else t.shape, None if t is None else t.dtype)]
    told = x, None, None, *shapes, weight, None, None, bias, None, None
    given = dy, *told, *settings, statistics, mask
    torch.library.opcheck(
        torch.ops.advisor.batchnorm_act_backward.default, given, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.long
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("activation", "residual"), [("none", False), ("silu", False), ("relu", True), ("none", True)])
@pytest.mark.parametrize(("blocks", "slots"), [(5, 9), (7, 1), (7, 9), (16, 1)])
def test_blocks_that_have_whole_rows_exchange_their_sums_twice(
    one_row, monkeypatch: pytest.MonkeyPatch, dtype: str, activation: str, residual: bool, blocks: int, slots: int
) -> None:
    one_row.use(sm_count=blocks)
    monkeypatch.setattr(spec, "grid_slots", lambda *_, **__: slots)
    monkeypatch.setattr(spec, "WHOLE_ROW_BYTES", dict.fromkeys(spec.WHOLE_ROW_BYTES, -1))
    channels = {5: 20, 7: 22, 16: 42}[blocks] * storage.vector_width(dtype)
    for forked in (False, True):
        grid = cases.case_of((8, channels, 9, 14), dtype, activation, residual, way=spec.GRID, forked=forked)
        one_row.launches.clear()
        row = verify.check(FAMILY, grid, "cpu")
        assert row["passed"], row["detail"]
        assert set(one_row.launches) == {"batchnorm_act_grid_forward", "batchnorm_act_grid_backward"}
    shape = spec.grid(
        spec.GRID_FORWARD, 8 * 9 * 14, channels, dtype, activation, residual=residual, sm_count=blocks, arch=90
    )
    assert shape is not None
    assert shape.whole


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("activation", "residual"), [("none", False), ("silu", False), ("relu", True)])
@pytest.mark.parametrize(
    ("channels", "blocks", "slots"), [(27, 5, 9), (27, 2, 1), (26, 3, 1), (58, 7, 9), (10, 1, 0), (9, 16, 9)]
)
def test_joined_rows_in_one_launch(
    one_row,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    activation: str,
    residual: bool,
    channels: int,
    blocks: int,
    slots: int,
) -> None:
    one_row.use(sm_count=blocks)
    monkeypatch.setattr(spec, "grid_slots", lambda *_, **__: slots)
    monkeypatch.setattr(spec, "GRID_LEAST_BYTES", 0)
    one_row.launches.clear()
    row = verify.check(FAMILY, cases.case_of((8, channels, 9, 14), dtype, activation, residual), "cpu")
    assert row["passed"], row["detail"]
    assert set(one_row.launches) == {"batchnorm_act_grid_forward", "batchnorm_act_grid_backward"}


@pytest.mark.parametrize(("activation", "residual"), [("silu", False), ("relu", True)])
def test_joined_rows_whose_forward_alone_is_one_launch(one_row, monkeypatch, activation: str, residual: bool) -> None:
    one_row.use(sm_count=1)
    monkeypatch.setattr(spec, "grid_slots", lambda *_, **__: 6)  # x is held, not x and what comes from above
    monkeypatch.setattr(spec, "streaming_wins", lambda *_, **__: False)
    monkeypatch.setattr(spec, "GRID_LEAST_BYTES", 0)
    case = cases.case_of((8, 27, 9, 14), "bfloat16", activation, residual)
    assert verify.check(FAMILY, case, "cpu")["passed"]
    one_row.launches.clear()
    given = case.inputs(verify.seeded("cpu", 0), 8)
    case.ours(*given).float().sum().backward()
    assert dict(one_row.launches) == {
        "batchnorm_act_grid_forward": 1,
        "batchnorm_act_backward_reduce": 1,
        "batchnorm_join_sums": 1,
        "batchnorm_act_backward_apply": 1,
    }


# As above, in what blocks with whole rows exchange.
WHOLE_FAULTS = {
    "no barrier before the block's sums": ("  __syncthreads();\n  for (int s = threadIdx.x / 32", "  for (int s = threadIdx.x / 32"),
    "no barrier behind them": ("  __syncthreads();\n  float4* const partial", "  float4* const partial"),
    "one row left out": ("strided_sum(values, THREADS - vectors + 1,", "strided_sum(values, THREADS - 2 * vectors,"),
    "rows beyond the last": ("i + u * step < end ? values", "i + u * step < end + step ? values"),
    "the first column alone": ("if (channels < columns) {  // and", "if (false) {"),
    "the last column left out": ("column = channel + channels; column < columns;", "column = channel + channels; column + channels < columns;"),
    "an odd channel's neighbour not sent": ("  if (pair < pairs) {\n    float sums", "  if (2 * pair + 1 < channels) {\n    float sums"),
    "a block's sums left out": ("p < blocks; p += OWNED_AT_ONCE", "p < blocks - 1; p += OWNED_AT_ONCE"),
    "the other half's sums left out": ("first += __shfl_xor_sync(0xffffffffu, other ? sum.x : sum.z, 16);", ""),
    "a lane's sums left out": ("int apart = 8; apart > 0;", "int apart = 8; apart > 1;"),
    "one copy for all": ("made + lane % COPIES * pairs + own", "made + own"),
    "too few values a channel": ("(double)rows * joined", "(double)rows"),
    "constants of the first column alone": ("column < width; column += channels", "column < channels; column += channels"),
    "words left for the next launch but one": ("exchanged_words(WHOLE_ROWS ? channels : width)", "exchanged_words(1)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WHOLE_FAULTS)
def test_a_fault_planted_where_sums_are_exchanged_twice_is_found(
    one_row, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    one_row.use(sm_count=5)
    monkeypatch.setattr(spec, "GRID_LEAST_BYTES", 0)
    joined = cases.case_of((8, 27, 9, 14), "bfloat16", "silu", False)
    assert not passes_with(monkeypatch, FAMILY, joined, *WHOLE_FAULTS[fault])
