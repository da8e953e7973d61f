"""Finds 3 x 3 convolutions of stride 1 between many channels in a captured graph."""

from __future__ import annotations

import torch

from advisor.ops.rewriting_3x3 import rewriting
from advisor.ops.winograd import api, spec

rewrite = rewriting(spec, lambda: (spec.DTYPE,), api.winograd, torch.ops.advisor.winograd.default, padded=True)
