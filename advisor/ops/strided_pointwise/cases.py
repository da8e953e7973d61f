"""Shapes at which the kernels for 1 x 1 convolutions of stride 2 are measured and verified."""

from __future__ import annotations

from functools import partial

from advisor.ops.convolution_cases import Tensors, case
from advisor.ops.family import Case, Work
from advisor.ops.strided_pointwise import api, reference, spec


def case_of(shape: tuple[int, ...], outputs: int, dtype: str = "bfloat16") -> Case:
    """A convolution of x of this shape to so many channels."""
    call = spec.call(shape, outputs)
    nbytes, flops = spec.bytes_moved(call, 2), spec.flops(call)
    return case(
        api.CONVOLUTION,
        Tensors(shape, (outputs, call.inputs, 1, 1), (), dtype=dtype),
        passes=(
            Work(kernels=(spec.PRODUCT,), nbytes=nbytes[0], flops=flops[0], unit="matrix"),
            Work(kernels=(spec.PRODUCT, spec.GATHER), nbytes=nbytes[1], flops=flops[1], unit="matrix"),
        ),
        name=spec.name(call.inputs, outputs),
        kind=spec.KIND,
        ours=api.strided_pointwise_conv2d,
        reference=reference.strided_pointwise_conv2d,
        wins=partial(spec.wins, call, dtype),
    )


BENCHMARK = (
    *(case_of((n, inputs, side, side), outputs) for n, inputs, outputs, side in spec.TRAINED),
    *(case_of((n, inputs, side, side), outputs, "float16") for n, inputs, outputs, side in spec.TRAINED[:1]),
)
# One to a few pixels, odd sizes, one image, channels that fill no chunk and no block, several chunks and blocks across.
VERIFICATION = (
    case_of((1, 8, 1, 1), 8),
    case_of((2, 64, 3, 2), 64, "float16"),
    case_of((3, 64, 9, 13), 128),
    case_of((1, 24, 8, 33), 72),
    case_of((2, 136, 7, 9), 40, "float16"),
    case_of((5, 320, 6, 5), 200),
    case_of((1, 64, 10, 64), 272),
    case_of((2, 512, 4, 7), 64),
)
