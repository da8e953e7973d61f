"""A loop of CuPy alone: no search process, all changes on from the start, proved together, each left out once."""

from test_search import Script, apply, script  # noqa: F401 – fixtures

ALL = ("cupy_single", "cupy_graphs", "cupy_kernels_once")


def times(script, of):  # noqa: F811 – a fixture
    """Step times by what is on, in the order of trial."""
    script.step_us[()] = 1000.0
    for names, step_us in of.items():
        script.step_us[names] = step_us


def test_all_are_proved_at_once_and_what_gains_nothing_is_dropped(script):  # noqa: F811 – a fixture
    times(
        script,
        {
            ("cupy_kernels_once", "cupy_single", "cupy_graphs"): 400.0,
            ("cupy_kernels_once", "cupy_graphs"): 380.0,  # fp32 loses here
            ("cupy_graphs",): 600.0,
            ("cupy_single", "cupy_graphs"): 600.0,
            ("cupy_kernels_once", "cupy_single"): 900.0,
            ("cupy_kernels_once",): 900.0,
        },
    )
    _, plan, code, verdicts = apply(script, *ALL)
    assert code == 0
    assert {session.mode for session in script.launches} == {"measure"}
    assert {item.transform for item in plan.items if item.status == "kept"} == {"cupy_graphs", "cupy_kernels_once"}
    assert verdicts["cupy_single"].reason == "the plan is as fast without it"
    assert "2.6" in plan.speedup


def test_where_all_at_once_do_not_run_graphs_are_left_out_first(script):  # noqa: F811 – a fixture
    times(script, {("cupy_kernels_once", "cupy_single"): 500.0})
    script.step_us[("cupy_kernels_once", "cupy_single", "cupy_graphs")] = None  # the process fails
    _, plan, code, verdicts = apply(script, *ALL, time_s=60.0)
    assert code == 0
    assert {item.transform for item in plan.items if item.status == "kept"} >= {"cupy_kernels_once", "cupy_single"}
    assert verdicts["cupy_graphs"].status != "kept"
