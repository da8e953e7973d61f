"""Of which plain scripts fresh runs tell the kernels' own time."""

import pytest

from advisor.core.environment import Environment
from advisor.core.profile import InputStats, Spread, StepProfile
from advisor.trials import fresh


@pytest.mark.parametrize(
    ("busy_us", "next_us", "steps"),
    [
        (68.0, 0.0, fresh.KERNEL_STEPS),  # the host's launches bound it
        (99.0, 0.0, 0),  # its device does
        (68.0, 30.0, 0),  # and here, beside its loader: a 3-D ResNet's search made a plain run of 33 s for it
        (40.0, 30.0, fresh.KERNEL_STEPS),
    ],
)
def test_the_kernels_time_is_asked_for_where_neither_the_step_nor_its_loader_tells_it(busy_us, next_us, steps):
    step = Spread(median=100.0, p10=100.0, p90=100.0, n=20, raw=(100.0,) * 20)
    profile = StepProfile(
        script="train.py",
        argv=(),
        created="",
        environment=Environment(),
        step_kind="optimizer",
        step_us=step,
        wall_us=step,
        busy_us=busy_us,
        input=InputStats(loader="DataLoader", next_us=next_us),
    )
    assert fresh.kernel_steps(profile) == steps
