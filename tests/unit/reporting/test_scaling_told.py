"""What is foretold of several ranks, as text."""

import samples

from advisor.analysis import scaling as analysis
from advisor.reporting import scaling


def test_a_run_without_a_gpu_is_not_told_as_one_of_a_gpu():
    link = analysis.link("nvlink")
    rows = analysis.foretell(samples.resnet50(), (2, 8), inside=link, between=link, host=8)
    on_cpu = scaling.text(rows, one_us=7e5, links=(), samples=1e6, device="cpu")
    assert "Foretold from one process\n  The run was on a CPU" in on_cpu
    assert "process-hours" in on_cpu
    assert "one GPU" not in on_cpu
    assert "Foretold from one GPU\n  one GPU: 700 ms" in scaling.text(rows, one_us=7e5, links=(), samples=1e6)
