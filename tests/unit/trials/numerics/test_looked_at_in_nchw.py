"""In which layout the gate's own runs of PyTorch's operations are."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.trials.numerics import layout


class Strides(TorchDispatchMode):
    """Notes the filters' strides of every convolution, forward and backward."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "convolution_backward" in str(func):
            self.found.append(args[2].stride())
        elif "convolution" in str(func):
            self.found.append(args[1].stride())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("taps", "turned"), [(9, True), (3, False)])
def test_depthwise_convolutions_of_many_taps_run_in_nchw(taps, turned):
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(8, 8, taps, padding=taps // 2, groups=8).to(memory_format=torch.channels_last)
    nhwc = conv.weight.stride()
    image = torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last).requires_grad_()
    plain = conv(image)
    with Strides() as strides, layout.many_taps_in_nchw(conv):
        found = conv(image)
        found.square().sum().backward()
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, plain)
    expected = (taps * taps, taps * taps, taps, 1)
    assert strides.found == [expected if turned else nhwc] * 2
    assert nhwc != expected


def test_a_layout_is_told_by_strides_where_one_channel_is_contiguous_in_both():
    filters = torch.zeros(8, 1, 9, 9).to(memory_format=torch.channels_last)
    assert layout.nchw(filters).stride() == (81, 81, 9, 1)
    assert not layout.in_nhwc([filters], {"image": torch.zeros(2, 3, 4, 4)})
    assert layout.in_nhwc({"image": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)})
