"""Every family's kernels on a GPU: its verification cases, and that a capture of them replays."""

from __future__ import annotations

import os

import pytest
import torch

from advisor.ops import catalog, dispatch, nvrtc, verify
from advisor.ops.family import Case, Family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CASES = [(family, case) for family in catalog.FAMILIES for case in family.verification]


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """The kernels of the families that are asked for, all at once; where tests share the cores each compiles what it launches."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    asked = {id(item.callspec.params["family"]) for item in request.session.items if item.path == request.path}
    nvrtc.warm(v for family in catalog.FAMILIES if id(family) in asked for v in family.variants(nvrtc.arch(0)))


@pytest.mark.parametrize(("family", "case"), CASES, ids=lambda value: getattr(value, "label", getattr(value, "id", "")))
def test_verification_case(family: Family, case: Case) -> None:
    row = verify.check(family, case, "cuda")
    if row["passed"] is None:
        pytest.skip(str(row["detail"]))
    assert row["passed"], row["detail"]


FIRST = {(family.id, case.name): (family, case) for family, case in reversed(CASES) if case.dtype == "bfloat16"}


@pytest.mark.parametrize(("family", "case"), FIRST.values(), ids=lambda v: getattr(v, "label", getattr(v, "id", "")))
def test_captured_in_a_graph_and_replayed(family: Family, case: Case) -> None:
    arguments = case.inputs(verify.seeded("cuda", 0), case.shape[0])
    with dispatch.everything(), torch.no_grad():
        case.ours(*arguments)  # compiles, and makes what is made once
        before = sum(family.engaged.values())
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = verify.tensors(case.ours(*arguments))
        if case.passes["forward"].kernels:  # else it is PyTorch's own
            assert sum(family.engaged.values()) > before
        arguments[0].copy_(case.inputs(verify.seeded("cuda", 1), case.shape[0])[0])
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        fresh = verify.tensors(case.ours(*arguments))
    for mine, want in zip(captured, fresh, strict=True):
        torch.testing.assert_close(mine, want)
