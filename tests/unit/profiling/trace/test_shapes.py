from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from advisor.profiling.trace import calls, costs, shapes

F32, BF16 = "float", "c10::BFloat16"


def cost(op: str, inputs: list[Any], dtypes: list[str], arguments: list[Any] | None = None) -> calls.Cost:
    text = json.dumps(arguments) if arguments is not None else ""
    return shapes.cost(f"aten::{op}", json.dumps(inputs), ",".join(dtypes), text)


def conv_call(x: list[int], w: list[int], stride: int, padding: int, groups: int, transposed: bool) -> calls.Cost:
    two = [stride, stride]
    arguments = [None, None, None, two, [padding, padding], [1, 1], transposed, [0, 0], groups]
    return cost("convolution", [x, w, [], [], [], [], [], [], []], [F32, F32, "", *[""] * 6], arguments)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("groups", "stride", "padding"), [(1, 1, 0), (1, 2, 1), (2, 1, 1), (4, 2, 0)])
def test_convolution_output_and_flops_agree_with_torch(
    transposed: bool, groups: int, stride: int, padding: int
) -> None:
    x = torch.zeros(2, 4, 9, 9)
    w = torch.zeros(4, 8 // groups, 3, 3) if transposed else torch.zeros(8, 4 // groups, 3, 3)
    function = F.conv_transpose2d if transposed else F.conv2d
    y = function(x, w, stride=stride, padding=padding, groups=groups)
    found = conv_call(list(x.shape), list(w.shape), stride, padding, groups, transposed)
    positions = x.numel() if transposed else y.numel()
    assert found.flops == 2 * positions * w[0].numel()
    assert found.nbytes == 4 * (x.numel() + w.numel() + y.numel())
    assert found.exact
    assert found.dtype == "fp32"


def test_a_stride_beyond_the_taps_steps_over_the_rest() -> None:
    """A 1 x 1 convolution of stride 2 reads a fourth: its whole input at copy bandwidth took longer than it did."""
    x, w, y = [2, 4, 8, 8], [8, 4, 1, 1], [2, 8, 4, 4]
    assert conv_call(x, w, 2, 0, 1, False).nbytes == 4 * (512 / 4 + 32 + 256)
    tail = [None, None, None, [8], [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]]
    assert cost("convolution_backward", [y, x, w], [F32] * 3, tail).nbytes == 4 * (512 / 4 + 32 + 256)


def test_convolution_backward_is_two_products_or_one() -> None:
    y, x, w = [2, 8, 7, 7], [2, 4, 9, 9], [8, 4, 3, 3]
    tail = [None, None, None, [8], [1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    both = cost("convolution_backward", [y, x, w], [BF16] * 3, [*tail, [True, True, False]])
    first_layer = cost("convolution_backward", [y, x, w], [BF16] * 3, [*tail, [False, True, False]])
    product = 2 * 2 * 8 * 49 * 36
    ny, nx, nw = 784, 648, 288
    assert both.flops == 2 * product
    assert both.nbytes == 2 * (ny + 2 * nx + 2 * nw)
    assert first_layer.flops == product
    assert first_layer.nbytes == 2 * (ny + nx + nw)
    assert both.dtype == "bf16"


@pytest.mark.parametrize(
    ("inputs", "dtypes", "dtype"),
    [
        ([[], [], []], ["double", "Scalar", ""], ""),  # a number of Python's, wrapped
        ([[4], []], ["float", "double"], "fp32"),
        ([[4]], ["double"], "fp64"),
        ([[4], [4]], ["float", "double"], "fp64"),
    ],
)
def test_a_number_in_fp64_is_no_work_in_fp64(inputs: list[Any], dtypes: list[str], dtype: str) -> None:
    assert cost("_to_copy", inputs, dtypes).dtype == dtype


def test_matrix_products() -> None:
    assert cost("addmm", [[10], [4, 8], [8, 10]], [F32] * 3).flops == 2 * 4 * 8 * 10
    assert cost("mm", [[4, 8], [8, 10]], [F32] * 2).nbytes == 4 * (32 + 80 + 40)
    assert cost("bmm", [[3, 4, 8], [3, 8, 10]], [BF16] * 2).flops == 2 * 3 * 4 * 8 * 10
    assert cost("linear", [[5, 4, 8], [10, 8], [10]], [F32] * 3).flops == 2 * 20 * 8 * 10


def test_elementwise_reads_inputs_and_writes_the_largest() -> None:
    assert cost("add", [[8, 16], [16], []], [F32, F32, "Scalar"]).nbytes == 4 * (128 + 16 + 128)
    assert cost("eq", [[8, 16], [8, 16]], [F32, F32]).nbytes == 4 * 256 + 128


def test_pooling_counts_indices() -> None:
    forward = cost(
        "max_pool2d_with_indices", [[2, 3, 8, 8], [], [], [], [], []], [F32, "", "", "", "", ""],
        [None, [2, 2], [], [0, 0], [1, 1], False],
    )  # fmt: skip
    assert forward.nbytes == 4 * 384 + 96 * (4 + 8)
    backward = cost("max_pool2d_with_indices_backward", [[2, 3, 4, 4], [2, 3, 8, 8]], [F32, F32])
    assert backward.nbytes == 96 * (4 + 8) + 4 * 384


def test_pool_ceil_mode_agrees_with_torch() -> None:
    x = torch.zeros(1, 1, 10, 10)
    y = F.max_pool2d(x, 3, 2, ceil_mode=True)
    assert costs.window_output([10, 10], [3, 3], [2, 2], [0, 0], [1, 1], ceil=True) == list(y.shape[2:])


def test_reductions_copies_fills_and_casts() -> None:
    x = [4, 8, 5, 5]
    assert cost("mean", [x, [], []], [F32, "", ""], [None, [2, 3], True, None]).nbytes == 4 * (800 + 32)
    assert cost("sum", [x], [F32]).nbytes == 4 * 801
    assert cost("copy_", [x, x], [BF16, F32]).nbytes == 800 * (2 + 4)
    assert cost("zero_", [x], [F32]).nbytes == 3200
    assert cost("_to_copy", [x, []], [F32, ""], [None, 15]).nbytes == 800 * (4 + 2)


def test_what_is_only_written_is_not_read() -> None:
    x = [4, 8, 5, 5]
    for name in ("zeros_like", "ones_like", "full_like"):
        assert cost(name, [x, []], [F32, ""]).nbytes == 3200
    assert cost("new_zeros", [[2, 4], []], [BF16, "ScalarList"], [None, [8, 4], 15]).nbytes == 32 * 2
    assert cost("new_full", [x, []], [F32, "ScalarList"]).nbytes == 0  # its size was not recorded
    assert cost("_foreach_copy_", [[[8, 4], [8]], [[8, 4], [8]]], ["TensorList", "TensorList"]).nbytes == 2 * 4 * 40


def test_optimizer_lists() -> None:
    parameters = [[8, 3, 3, 3], [8]]
    n = 224
    assert cost("_foreach_add_", [parameters, parameters, []], ["TensorList", "TensorList", ""]).nbytes == 3 * 4 * n
    # parameters and momentum are read and written, gradients are read
    fused = cost("_fused_sgd_", [parameters, parameters, parameters], ["TensorList"] * 3)
    assert fused.nbytes == 4 * n * (3 + 2)


def test_upsample_concat_and_loss() -> None:
    assert cost("upsample_bilinear2d", [[2, 3, 4, 4], [], [], []], [F32, "", "", ""],
                [None, [8, 8], False, None]).nbytes == 4 * (96 + 384)  # fmt: skip
    assert cost("cat", [[[2, 3, 4], [2, 5, 4]], []], ["TensorList", "Scalar"]).nbytes == 2 * 4 * 64
    found = cost("nll_loss_backward", [[], [16, 10], [16]], [F32, F32, "long int"])
    assert found.nbytes == 4 + 16 * 8 + 4 * 160


def test_unknown_operators_are_labelled() -> None:
    found = cost("some_op", [[4, 4], [4]], [F32, F32])
    assert found.nbytes == 4 * (16 + 4 + 16)
    assert not found.exact
    assert shapes.cost("aten::add", "", "") == calls.Cost()
    assert shapes.cost("aten::add", "not json", "float") == calls.Cost()
    assert shapes.cost("aten::convolution", "[[4]]", "float").nbytes == 32  # too few inputs for the model


@pytest.mark.parametrize(
    ("memory_format", "expected"), [(torch.channels_last, "nhwc"), (torch.contiguous_format, "nchw")]
)
def test_layout_from_strides(memory_format: torch.memory_format, expected: str) -> None:
    x = torch.zeros(2, 3, 4, 5).to(memory_format=memory_format)
    assert shapes.layout(str([list(x.shape)]), str([list(x.stride())])) == expected


def test_layout_of_ambiguous_tensors_is_unknown() -> None:
    one = torch.zeros(2, 1, 4, 4)
    assert shapes.layout(str([list(one.shape)]), str([list(one.stride())])) == ""
    assert shapes.layout("[[2, 3, 4, 5]]", "") == ""
