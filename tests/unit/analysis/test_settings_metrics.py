"""Settings of torch, the environment and the host, as metrics; and the rules that read them, over whole profiles."""

from __future__ import annotations

from dataclasses import replace

import profiles
import pytest

from advisor import rules
from advisor.analysis import metrics
from advisor.analysis.predict import predict
from advisor.core.findings import Finding, Outcome
from advisor.core.profile import MemoryStats, Quantity, StepProfile
from advisor.core.provenance import Provenance

RULES = rules.load()


def finding(profile: StepProfile, rule: str) -> Finding:
    chosen = [entry for entry in RULES if entry.id == rule]
    return rules.evaluate(chosen, metrics(profile), profile)[0]


def flagged(base: StepProfile, **flags: bool) -> StepProfile:
    return replace(base, model=replace(base.model, flags={**base.model.flags, **flags}))


def without_cudnn() -> StepProfile:
    """As a net with three blocks on an H200: 80.7 ms a step, 63.8 of them products of single samples at 2.6 % of the limit."""
    rows = [
        profiles.row(name="sgemm", kind="conv", op="aten::convolution", module="Net.a", phase="forward", calls=4000,
                     time_us=30_000, flops=100e9),
        profiles.row(name="im2col_kernel", kind="conv", op="aten::convolution_backward", module="Net.a", phase="backward",
                     calls=4400, time_us=33_800, flops=200e9),
        profiles.row(name="batch_norm_kernel", kind="norm", op="aten::native_batch_norm", module="Net.b",
                     module_type="BatchNorm2d", phase="forward", calls=18, time_us=6_200, modelled_bytes=3.4e9),
    ]  # fmt: skip
    rows[:2] = [replace(row, limit_us=row.time_us * 0.026) for row in rows[:2]]
    base = profiles.profile(rows, step_us=80_670, launches=8_548, launch_us=54_000, optimizer_host_us=0.0)
    model = replace(base.model, set_at={"cudnn_enabled": "train.py:14"})
    return flagged(replace(base, model=model), cudnn_enabled=False, tf32_conv=True)


def test_cudnn_off_is_told_with_its_line_and_its_share() -> None:
    found = finding(without_cudnn(), "cudnn-off")
    assert found.outcome is Outcome.FIRED
    assert found.severity == "high"
    assert found.sites == ("train.py:14 sets it",)
    assert found.gain is not None
    assert 0.4 < found.gain.low < 0.8 < found.gain.high < 0.97


@pytest.mark.parametrize("transform", ["channels_last", "cudnn_benchmark"])
def test_what_works_inside_cudnn_is_not_predicted_to_help_without_it(transform: str) -> None:
    gain = predict(without_cudnn(), transform, {})
    assert gain is not None
    assert (gain.low, gain.high) == (0.0, 0.0)
    assert "switched off" in gain.basis


def test_with_cudnn_on_the_rule_is_quiet_and_no_share_is_told() -> None:
    profile = flagged(without_cudnn(), cudnn_enabled=True)
    assert finding(profile, "cudnn-off").outcome is Outcome.QUIET
    assert metrics(profile)["cudnn_off_saved_high"].value is None


def in_half(base: StepProfile, dtype: str, **rates: float) -> StepProfile:
    rows = tuple(replace(row, dtype=dtype) if row.kind in ("conv", "gemm") else row for row in base.kernels)
    return replace(base, kernels=rows, environment=replace(base.environment, matrix_tflops=rates))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_half_precision_that_the_machine_lacks_is_told_by_its_measured_rate(dtype: str) -> None:
    slow = in_half(profiles.laptop(), dtype, fp32=0.2, **{dtype: 0.005})
    table = metrics(slow)
    assert table["half_dtype"].value == dtype
    assert table["half_speed"].value == pytest.approx(0.025)
    found = finding(slow, "half-without-hardware")
    assert found.outcome is Outcome.FIRED
    assert found.gain is not None
    share = table.number("tensor_eligible_frac") * table.number("work_frac")
    assert found.gain.low < share * (1 - 0.025) < found.gain.high
    fast = in_half(profiles.laptop(), dtype, fp32=0.2, **{dtype: 0.6})
    assert finding(fast, "half-without-hardware").outcome is Outcome.QUIET


def test_bf16_on_a_gpu_before_ampere_needs_no_rate() -> None:
    old = in_half(profiles.resnet50(), "bf16", fp32=14.0, fp16=100.0)
    old = replace(old, environment=replace(old.environment, sm_arch=75))
    assert finding(old, "half-without-hardware").outcome is Outcome.FIRED
    assert finding(in_half(old, "fp16", fp32=14.0, fp16=100.0), "half-without-hardware").outcome is Outcome.QUIET


def test_half_precision_is_held_against_tf32_where_that_is_allowed() -> None:
    profile = flagged(in_half(profiles.resnet50(), "bf16", fp32=20.0, tf32=150.0, bf16=120.0), tf32_conv=True)
    assert metrics(profile)["half_speed"].value == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("threads", "others", "outcome"),
    [(1, 0.0, Outcome.FIRED), (2, 0.0, Outcome.QUIET), (1, 0.2, Outcome.FIRED), (1, 0.5, Outcome.QUIET)],
)
def test_threads_are_held_against_physical_cores_that_nobody_uses(
    threads: int, others: float, outcome: Outcome
) -> None:
    base = profiles.laptop()
    shares = {"cpu_util_frac": 0.5, "cpu_others_frac": others}
    used = {name: Quantity(value=value, provenance=Provenance.MEASURED) for name, value in shares.items()}
    profile = replace(
        base,
        utilization={**base.utilization, **used},
        environment=replace(base.environment, cpu_count=4, core_count=2),
        model=replace(base.model, cpu_threads=threads, env={"OMP_NUM_THREADS": "1"}, set_at={}),
    )
    found = finding(profile, "threads-fewer-than-cores")
    assert found.outcome is outcome
    if outcome is Outcome.FIRED:
        assert found.sites == ("OMP_NUM_THREADS=1",)
        assert found.gain is not None
        work = metrics(profile)["work_frac"].value
        free = 0.5 - others  # of the cores' time: where all of it would be used, half of the work has gone
        assert found.gain.high == pytest.approx(
            free / (0.5 + free) * (1 + work) / 2
        )  # and of what lies between operators half


@pytest.mark.parametrize(
    ("env", "memory", "told"),
    [
        ({"CUDNN_CONV_WSCAP_DBG": "8"}, {}, "CUDNN_CONV_WSCAP_DBG=8"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, {}, ""),  # products' affair
        ({}, {"retries": 3}, "had to give memory back"),
        ({}, {"total_bytes": 100, "peak_allocated_bytes": 95}, "memory is full"),
        ({}, {"total_bytes": 100, "peak_allocated_bytes": 80, "peak_reserved_bytes": 99}, ""),
    ],
)
def test_what_limits_workspaces_is_named(env: dict[str, str], memory: dict[str, int], told: str) -> None:
    base = profiles.resnet50()
    profile = replace(base, model=replace(base.model, env=env), memory=MemoryStats(**memory))
    limit = metrics(profile)["workspace_limit"].value
    assert isinstance(limit, str)
    assert told in limit if told else not limit


def test_variables_that_slow_are_told_and_those_of_groups_only_in_one() -> None:
    base = profiles.resnet50()
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "NCCL_P2P_DISABLE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    alone = replace(base, model=replace(base.model, env=env))
    assert metrics(alone)["slowing_variables"].value == "PYTORCH_NO_CUDA_MEMORY_CACHING"
    group = replace(alone, model=replace(alone.model, world_size=2))
    assert metrics(group)["slowing_variables"].value == "PYTORCH_NO_CUDA_MEMORY_CACHING, NCCL_P2P_DISABLE"
