"""What is predicted for several ranks, as text."""

import samples

from advisor.analysis import scaling as analysis
from advisor.reporting import scaling


def test_a_run_without_a_gpu_is_not_told_as_one_of_a_gpu():
    link = analysis.link("nvlink")
    rows = analysis.foretell(samples.resnet50(), (2, 8), inside=link, between=link, host=8)
    on_cpu = scaling.text(rows, one_us=7e5, links=(), samples=1e6, device="cpu")
    assert "Predicted from the profile of one process\n  The run was on a CPU" in on_cpu
    assert "process-hours" in on_cpu
    assert "one GPU" not in on_cpu
    on_gpu = scaling.text(rows, one_us=7e5, links=(), samples=1e6)
    assert "Predicted from the profile of one GPU\n  one GPU: 700 ms" in on_gpu


def test_a_table_of_many_gpus_fits_a_terminal():
    link = analysis.link("ib400")
    rows = analysis.foretell(samples.resnet50(), (2, 100_000), inside=link, between=link, host=8)

    told = scaling.text(rows, 80, one_us=7e5, links=("word " * 30,))
    assert max(map(len, told.splitlines())) <= 80
