"""Finds 3 x 3 convolutions of stride 1 between few channels in a captured graph."""

from __future__ import annotations

import torch
from torch import fx

from advisor.ops import match
from advisor.ops.conv3x3 import api, spec
from advisor.ops.family import Producer
from advisor.ops.rewriting_3x3 import rewriting

rewrite = rewriting(spec, lambda: spec.STORAGE, api.conv3x3, torch.ops.advisor.conv3x3.default)


def _moments_win(node: fx.Node) -> str:
    weight = match.value(node.args[1])
    if weight is None:
        return "its sizes are not known"
    return spec.moments_win(int(weight.shape[1]), int(weight.shape[0]))


PRODUCES = {api.conv3x3: Producer(api.conv3x3_moments, _moments_win)}
